"""State that others saved is loaded, and theirs by others: other numbers of ranks, other layouts, torch's own sharding.

Everything is equal to the bit. Each job does many exchanges, since most of its time goes into importing torch's modules.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    set_state_dict_type,
)
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.wrap import ModuleWrapPolicy

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
OURS = ("wrapper", "flat", "composable")


class Block(nn.Sequential):
    pass


def plain(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), Block(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)), nn.Linear(1, 3))
    model[2].weight.requires_grad_(False)
    model[1][1].running_mean.normal_()
    model.double()
    # A column of a transposed matrix: contiguous, and a piece of one element has a stride of 3.
    column = nn.Parameter(torch.randn(1, 3, dtype=torch.float64).t(), requires_grad=False)
    assert column.is_contiguous() and column[:1].view(-1).stride() == (3,)
    model[2].weight = column
    return model


def ours(path, seed=1, form=SHARDED, *, nested=True, strategy=ShardingStrategy.FULL_SHARD):
    policy = ModuleWrapPolicy({Block}) if nested else None
    model = plain(seed)
    if path == "composable":
        fully_shard(model, policy=policy, strategy=strategy)
    else:
        for param in model.parameters() if path == "flat" else ():
            param.requires_grad_(True)
        options = {"auto_wrap_policy": policy, "use_orig_params": path == "wrapper"}
        model = FullyShardedDataParallel(model, sharding_strategy=strategy, **options)
    set_state_dict_type(model, form)
    return model


def theirs(kind, seed=1):
    """Return a model that torch shards, or replicates, and its state in its own sharded form."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    model, mesh = plain(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        fsdp.fully_shard(model[1], mesh=mesh)
        return fsdp.fully_shard(model, mesh=mesh)
    options = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    return fsdp.FullyShardedDataParallel(model, **options)


def assert_seed(state, seed):
    want = plain(seed).state_dict()
    assert set(state) == set(want)
    for name, value in want.items():
        assert torch.equal(state[name], value), name


def full(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# ------------------------------------------------------------------------------------ torch.distributed.checkpoint, files


def quiet(function):
    """Let torch warn of its own functions that are deprecated; the wrapped one says what is compared."""

    @functools.wraps(function)
    def quietly(*args, **kwargs):
        with warnings.catch_warnings(action="ignore"):
            return function(*args, **kwargs)

    return quietly


@quiet
def save(folder, *, back):
    """Save states of seed 0 in every way; with ``back`` also load what another number of ranks saved with seed 2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    for path in OURS:
        dcp.save({"model": ours(path, 0).state_dict()}, checkpoint_id=f"{folder}/{path}")
    dcp.async_save({"model": ours("flat", 0).state_dict()}, checkpoint_id=f"{folder}/async").result()
    for kind in ("fsdp1", "fsdp2") if not back else ():
        dcp.save({"model": get_model_state_dict(theirs(kind, 0))}, checkpoint_id=f"{folder}/{kind}")
    if back:
        for path in OURS:
            load(f"{back}/{path}", ours(path, nested=False))
        load(f"{back}/flat", theirs("fsdp2"))
        load(f"{back}/composable", theirs("fsdp1"))


def load(file, model):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=file)
    set_model_state_dict(model, state["model"])
    assert_seed(full(model), 0)


@quiet
def load_all(folder, name):
    """Load every file into every path, nested otherwise; then save ``name`` for the way back."""
    for source in (*OURS, "fsdp1", "fsdp2"):
        path = {"fsdp1": "wrapper", "fsdp2": "flat"}.get(source, OURS[OURS.index(source) - 1] if source in OURS else "")
        load(f"{folder}/{source}", ours(path, nested=source != "wrapper"))
    load(f"{folder}/async", ours("wrapper"))
    load(f"{folder}/flat", ours("composable", strategy=ShardingStrategy.NO_SHARD))
    load(f"{folder}/wrapper", ours("wrapper", strategy=ShardingStrategy.SHARD_GRAD_OP))
    save(name, back=None)


@pytest.mark.covers("SD-05", "SD-10", "SD-11", "SD-12")
def test_saved_by_two_ranks_loaded_by_three_and_back(worlds, tmp_path):
    first, second = str(tmp_path / "two"), str(tmp_path / "three")
    worlds(size=2).run(save, first, back=None)
    worlds(size=3).run(load_all, first, second)
    worlds(size=2).run(save, first + "again", back=second)


# ------------------------------------------------------------------------------------------------------------ in memory


@pytest.mark.world(2)
@pytest.mark.covers("SD-10", "SD-11")
@pytest.mark.filterwarnings("ignore")
def test_states_of_torch_in_memory(world):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    whole = StateDictOptions(full_state_dict=True)
    for kind, path in zip(("fsdp1", "fsdp2", "ddp"), OURS):
        model, other = ours(path, 1, FULL), theirs(kind, 0)
        model.load_state_dict(full(other))  # theirs into ours, by our own method
        assert_seed(model.state_dict(), 0)
        model = ours(path, 2, SHARDED)
        set_model_state_dict(other, full(model), options=whole)  # ours into theirs
        assert_seed(full(other), 2)
    # Shards as they are, without a file: both lay them out as DTensor does.
    model, other = ours("composable", 3), theirs("fsdp2", 0)
    model.load_state_dict(get_model_state_dict(other))
    assert_seed(full(model), 0)
    set_model_state_dict(other, ours("flat", 4).state_dict())
    assert_seed(full(other), 4)


@pytest.mark.world(2)
@pytest.mark.covers("SD-23")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", OURS)
def test_functions_of_torch_on_our_models(world, path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    source = ours(path, 0)
    state = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(state) == (world.rank == 0)
    for form in (FULL, SHARDED):
        set_state_dict_type(source, form)
        for options in ({}, {"full_state_dict": True}):
            model = ours(path, 1, form)
            given = get_model_state_dict(source, options=StateDictOptions(**options))
            set_model_state_dict(model, given, options=StateDictOptions(**options))
            assert_seed(full(model), 0)
    model = ours(path, 1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if path == "flat":
        # torch broadcasts what it finds registered, which original parameters are not here: every rank is refused.
        with pytest.raises(UnsupportedError, match="with broadcast_from_rank0: expected original parameters"):
            set_model_state_dict(model, state, options=from_first)
    else:
        set_model_state_dict(model, state, options=from_first)
    if path != "flat":
        assert_seed(full(model), 0)


@pytest.mark.world(2)
@pytest.mark.covers("SD-01", "SD-03", "SD-18")
@pytest.mark.parametrize("path", OURS)
def test_safetensors(world, path, tmp_path):
    tensors = pytest.importorskip("safetensors.torch", reason="an optional extra for tests")
    source = ours(path, 0, FULL)
    set_state_dict_type(source, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    state, file = source.state_dict(), f"{tmp_path}/{world.rank}"
    if world.rank == 0:
        tensors.save_file(state, file)
        assert_seed(tensors.load_file(file), 0)
        plain(1).load_state_dict(tensors.load_file(file))
    model = ours(path, 1, FULL)
    tensors.save_model(model, file)
    model = ours(path, 2, FULL)
    tensors.load_model(model, file)
    assert_seed(model.state_dict(), 1)
