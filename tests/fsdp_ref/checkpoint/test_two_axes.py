"""State of models with tensor parallelism: saved at 2x2 ranks, loaded at other shapes and by one process, equal to the bit."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    StateDictType,
    set_state_dict_type,
)
from fsdp_ref.errors import FsdpRuntimeError

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 5)).double()


@contextmanager
def mesh_of(shape):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    yield mesh
    for group in {*mesh.get_all_groups()} - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def sharded(mesh, path, seed=0):
    """Return a model and its optimizer over a mesh; columns and rows cut, the last layer's five rows unevenly."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as tp

    model = plain(seed)
    plan = {"1.up": tp.ColwiseParallel(), "1.down": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh["tp"], plan | {"2": tp.ColwiseParallel(output_layouts=Replicate())})
    policy = fsdp_ref.wrap.ModuleWrapPolicy({Block})
    if path == "composable":
        fsdp_ref.fully_shard(model, policy=policy, device_mesh=mesh["dp"])
    else:
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_mesh=mesh["dp"], use_orig_params=path == "wrapper"
        )
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optim):
    """One step on inputs that all ranks share, so that any number of them does the same."""
    model(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)).square().mean().backward()
    optim.step()
    optim.zero_grad()


def forms(model, form, rank0_only=False):
    if form is FULL:
        configs = FullStateDictConfig(rank0_only=rank0_only), FullOptimStateDictConfig(rank0_only=rank0_only)
        set_state_dict_type(model, form, *configs)
    else:
        set_state_dict_type(model, form, None, ShardedOptimStateDictConfig(offload_to_cpu=False))


def values(state, prefix=""):
    """Return all tensors of a state, nested ones by path, put together."""
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= values(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def equal(got, want, where):
    assert sorted(got) == sorted(want), where
    bad = [name for name, value in want.items() if not torch.equal(got[name], value)]
    assert not bad, f"{where}: {bad}"


def in_mesh(function, shape, *args):
    """What ranks run; over one data-parallel rank nothing is sharded, of which units warn."""
    with warnings.catch_warnings(action="ignore"), mesh_of(shape) as mesh:
        return function(mesh, *args)


def save(mesh, folder, path):
    """On each of 2x2 ranks: check both forms, save with DCP, return the whole state."""
    import torch.distributed.checkpoint as dcp

    model, optim = sharded(mesh, path)
    for _ in range(2):
        step(model, optim)
    forms(model, FULL)
    whole = {"model": values(model.state_dict()), "optim": values(fsdp_ref.optim_state_dict(model, optim)["state"])}
    forms(model, SHARDED)
    state = {"model": model.state_dict(), "optim": fsdp_ref.optim_state_dict(model, optim)["state"]}
    layouts = {
        name: (value.device_mesh.mesh_dim_names, tuple(map(str, value.placements)))
        for name, value in state["model"].items()
        if name.startswith("1.")
    }
    both = ("tp", "dp")
    assert layouts["1.up.weight"] == (both, ("S(0)", "S(0)"))
    assert layouts["1.down.weight"] == (both, ("S(1)", "S(0)"))
    assert layouts["1.down.bias"] == (both, ("R", "S(0)"))
    assert layouts["1.norm.weight"][0] == ("dp",)
    equal(values(state["model"]), whole["model"], "sharded model state")
    equal(values(state["optim"]), whole["optim"], "sharded optimizer state")
    dcp.save(state, checkpoint_id=folder)

    load_back(mesh, path, model, optim, whole)
    refuse_odd(model)
    return whole


def save_called_twice(mesh, path):
    """On each of 2x2 ranks: a layer under two names, of whose weight the second rank of an axis holds no element."""
    from torch.distributed.tensor import parallel as tp

    layer = nn.Linear(1, 1, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    tp.parallelize_module(model, mesh["tp"], {"0": tp.ColwiseParallel()})
    if path == "composable":
        fsdp_ref.fully_shard(model, device_mesh=mesh["dp"])
    else:
        model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=path == "wrapper")
    for form in (FULL, SHARDED):
        forms(model, form)
        saved = values(model.state_dict())
        assert list(saved) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        equal(saved, saved | {"0.weight": weight, "2.weight": weight}, form)


@pytest.mark.parametrize("path", ["composable", "wrapper", "flat"])
def test_a_layer_under_two_names_is_gathered_once_by_ranks_without_elements_too(worlds, path):
    worlds(size=4).run(in_mesh, save_called_twice, (2, 2), path)


def load_back(mesh, path, model, optim, whole):
    """Into another model of the same layout, in both forms, whole values from rank 0 alone too."""
    for form, rank0_only in ((SHARDED, False), (FULL, False), (FULL, True)):
        fresh, fresh_optim = sharded(mesh, path, seed=1)
        for each in (model, fresh):
            forms(each, form, rank0_only)
        given, moments = model.state_dict(), fsdp_ref.optim_state_dict(model, optim)
        if rank0_only:
            first = dist.get_rank() == 0
            assert bool(given) is bool(moments) is first
            forms(fresh, FULL)
            given = model_state(given)
            fresh.load_state_dict(given)
            forms(fresh, FULL, True)
        else:
            fresh.load_state_dict(given)
        fresh_optim.load_state_dict(fsdp_ref.optim_state_dict_to_load(fresh, fresh_optim, moments))
        for each in (model, fresh):
            forms(each, FULL)
        equal(values(fresh.state_dict()), whole["model"], f"{form.name} {rank0_only}")
        got = values(fsdp_ref.optim_state_dict(fresh, fresh_optim)["state"])
        equal(got, whole["optim"], f"optimizer, {form.name} {rank0_only}")


def refuse_odd(model):
    """A rank that would gather something else is named, and nobody waits for it."""
    forms(model, SHARDED)
    odd = dict(model.state_dict())
    if dist.get_rank() == 3:
        del odd["1.up.weight"]
    with pytest.raises(FsdpRuntimeError, match="same sharded entries"):
        model.load_state_dict(odd, strict=False)


def model_state(mine):
    """Return what rank 0 has."""
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def load(mesh, folder, path, whole):
    import torch.distributed.checkpoint as dcp

    model, optim = sharded(mesh, path, seed=1)
    step(model, optim)  # dcp fills what is there
    forms(model, SHARDED)
    state = {"model": model.state_dict(), "optim": fsdp_ref.optim_state_dict(model, optim)["state"]}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    groups = fsdp_ref.optim_state_dict(model, optim)["param_groups"]
    loaded = {"state": state["optim"], "param_groups": groups}
    optim.load_state_dict(fsdp_ref.optim_state_dict_to_load(model, optim, loaded))
    forms(model, FULL)
    equal(values(model.state_dict()), whole["model"], f"{path} {mesh}")
    got = values(fsdp_ref.optim_state_dict(model, optim)["state"])
    equal(got, whole["optim"], f"optimizer, {path} {mesh}")


def load_plain(folder, whole):
    """One process: from the files, and from the whole state; then the values of a plain optimizer fit, too."""
    import torch.distributed.checkpoint as dcp

    model = plain(seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    equal(state["model"], whole["model"], "plain")
    reference = plain()
    optim = torch.optim.Adam(reference.parameters(), lr=0.1)
    for _ in range(2):
        step(reference, optim)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(whole["model"][name], param.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            whole["optim"][f"{name}.exp_avg"], optim.state[param]["exp_avg"], rtol=1e-10, atol=1e-12
        )


def test_saved_at_two_by_two_loaded_elsewhere(worlds, tmp_path):
    folder = str(tmp_path)
    whole = worlds(size=4, timeout=300).run(in_mesh, save, (2, 2), folder, "composable")[0]
    for shape, path in (((1, 2), "wrapper"), ((2, 1), "flat")):
        worlds(size=2, timeout=300).run(in_mesh, load, shape, folder, path, whole)
    worlds(size=1, timeout=300).run(load_plain, folder, whole)


def saves_two_models_of_which_some_ranks_keep_the_first() -> list[str]:
    with mesh_of((2, 2)) as mesh:
        kept = []
        for seed in range(2):
            model, _ = sharded(mesh, "composable", seed)
            forms(model, SHARDED)
            names = list(model.state_dict())
            if dist.get_rank() < 2:
                kept.append(model)
            del model
            gc.collect()
    return names


def test_a_later_model_is_saved_whichever_ranks_still_have_an_earlier_one(worlds):
    # The exchange of ranks over the axes is made once, and when that is cannot depend on a rank's garbage collector.
    saved = worlds(size=4).run(saves_two_models_of_which_some_ranks_keep_the_first)
    assert len({tuple(names) for names in saved}) == 1
