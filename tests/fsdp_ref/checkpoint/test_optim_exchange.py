"""Optimizer state of torch's own implementations into ours and back, and through files of torch.distributed.checkpoint.

Two ranks add two numbers, so that everything is equal to the bit, the next step too.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    set_state_dict_type,
)
from fsdp_ref.fence.optimizers import guard
from fsdp_ref.storage.views import mark_flattened
from fsdp_ref.wrap import ModuleWrapPolicy


def plain():
    """Without scalar parameters, which torch refuses."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)), nn.Linear(5, 1)
    ).double()


def theirs(kind):
    """Return a model of torch's, its whole weights and its optimizer's state by name, and a function that loads such state."""
    from torch.distributed import fsdp
    from torch.distributed.checkpoint import state_dict as functions
    from torch.nn.parallel import DistributedDataParallel

    model, whole = plain(), functions.StateDictOptions(full_state_dict=True)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        model = fsdp.fully_shard(model)
    else:
        flat = kind == "fsdp1-flat"
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=not flat)
        # Its default form on the CPU returns the second moment in place of the first.
        options = fsdp.FullOptimStateDictConfig(offload_to_cpu=False)
        fsdp.FullyShardedDataParallel.set_state_dict_type(
            model, fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(), options
        )
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    if kind.startswith("fsdp1"):
        save = fsdp.FullyShardedDataParallel.optim_state_dict
        convert = fsdp.FullyShardedDataParallel.optim_state_dict_to_load

        def load(state):
            optim.load_state_dict(convert(model, optim, state))

        return model, optim, lambda: save(model, optim), load
    return (
        model,
        optim,
        lambda: functions.get_optimizer_state_dict(model, optim, options=whole),
        lambda state: functions.set_optimizer_state_dict(model, optim, copy.deepcopy(state), options=whole),
    )


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["fsdp1-orig", "fsdp1-flat", "fsdp2", "ddp"])
@pytest.mark.covers("OSD-08", "OSD-20", "OSD-05")
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_state_goes_both_ways(optim_lab, kind):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    whole = StateDictOptions(full_state_dict=True)
    other, other_optim, save, load = theirs(kind)
    for step in range(2):
        optim_lab.step(other, other_optim, step)
    saved, weights = save(), get_model_state_dict(other, options=whole)
    api = "flat" if kind == "fsdp2" else "orig"
    model = optim_lab.shard(f"{api} FULL_SHARD whole", plain())
    model.load_state_dict(weights)
    optim = torch.optim.AdamW(model.parameters())
    optim_state_dict_to_load(model, optim, saved, load_directly=True)
    optim_lab.same(optim_state_dict(model, optim)["state"], dict(saved["state"]))
    for one, its in ((model, optim), (other, other_optim)):
        optim_lab.step(one, its, 2)
    optim_lab.same(dict(model.state_dict()), dict(get_model_state_dict(other, options=whole)))
    optim_lab.step(model, optim, 3)
    ours = optim_state_dict(model, optim)
    set_model_state_dict(other, model.state_dict(), options=whole)
    load(ours)
    optim_lab.same(dict(save()["state"]), ours["state"])
    for one, its in ((model, optim), (other, other_optim)):
        optim_lab.step(one, its, 4)
    optim_lab.same(dict(model.state_dict()), dict(get_model_state_dict(other, options=whole)))


def sharded(api, seed=None):
    """Return a model whose optimizer has stepped with gradients of each element's own, or is to be loaded."""
    from fsdp_ref import fully_shard

    policy = ModuleWrapPolicy({nn.Sequential}) if api != "flat" else None
    options = {"auto_wrap_policy": policy, "use_orig_params": api == "orig"}
    model = fully_shard(plain(), policy=policy) if api == "composable" else FullyShardedDataParallel(plain(), **options)
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2 if seed is None else 1):
        for param in model.parameters():
            param.grad = param.detach() * 0.5 + 0.25 if seed is None else torch.full_like(param, seed)
            param.grad = param.grad if param.numel() else None
        optim.step()
    return model, optim


def save_files(folder):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):
        for api in ("flat", "orig", "composable"):
            dcp.save({"optim": optim_state_dict(*sharded(api))}, checkpoint_id=f"{folder}/{api}")


def load_files(folder):
    import torch.distributed.checkpoint as dcp

    found = []
    with warnings.catch_warnings(action="ignore"):
        for source, target in (("flat", "orig"), ("orig", "composable"), ("composable", "flat")):
            model, optim = sharded(target, seed=3.0)
            state = {"optim": optim_state_dict(model, optim)}
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            optim_state_dict_to_load(model, optim, state["optim"], load_directly=True)
            set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
            found.append(optim_state_dict(model, optim))
    return found if dist.get_rank() == 0 else None


@pytest.mark.covers("OSD-06", "OSD-08")
def test_files_of_two_ranks_are_loaded_by_three(worlds, tmp_path):
    worlds(size=2).run(save_files, str(tmp_path))
    found = worlds(size=3).run(load_files, str(tmp_path))[0]
    model = plain()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        for param in model.parameters():
            param.grad = param.detach() * 0.5 + 0.25
        optim.step()
    want = FullyShardedDataParallel.rekey_optim_state_dict(
        optim.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optim
    )
    assert len(found) == 3
    for state in found:
        assert state["state"].keys() == want["state"].keys()
        for name, entries in want["state"].items():
            assert all(torch.equal(state["state"][name][key], value) for key, value in entries.items()), name


def test_optimizers_of_torchs_own_sharded_models_are_left_alone():
    """torch's FSDP1 marks its parameters as we mark ours, for units around them."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter._fsdp_flattened = True
    guard(optimizer)
    assert not optimizer._optimizer_state_dict_pre_hooks
    ours = nn.Parameter(torch.ones(2))
    mark_flattened(ours, sharded=True)
    optimizer = torch.optim.SGD([ours], lr=0.1)
    guard(optimizer)
    assert optimizer._optimizer_state_dict_pre_hooks
