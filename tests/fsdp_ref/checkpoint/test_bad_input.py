"""Files that are damaged, of another model or hostile, a full disk, and moments at which nothing can be loaded.

Directories and moments that are refused leave the model, its optimizer and the checkpoint before as they were, on every rank.
"""

from __future__ import annotations

import functools
import re
import resource
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_ref import (
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
    unshard_params,
)
from fsdp_ref.errors import TrainingStateError, UnshardConflictError
from fsdp_ref.wrap import ModuleWrapPolicy

SHARDED = StateDictType.SHARDED_STATE_DICT


def trained(seed, shapes=((3, 5), (5, 2)), path="composable"):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes)).double()
    if path == "composable":
        fully_shard(model, policy=ModuleWrapPolicy({nn.Linear}))
    else:
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def numbers(model, optim):
    """Return copies of all that this rank has."""
    entries = [entry for state in optim.state.values() for entry in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *entries)]


def sharded(model, optim):
    with state_dict_type(model, SHARDED):
        return {"model": model.state_dict(), "optimizer": optim_state_dict(model, optim)}


def load(folder, model, optim):
    state = sharded(model, optim)
    dcp.load(state, checkpoint_id=folder)
    with state_dict_type(model, SHARDED):
        model.load_state_dict(state["model"])
        optim_state_dict_to_load(model, optim, state["optimizer"], load_directly=True)


def quiet(function):
    """Let torch warn of files that it cannot read; what it raises is compared."""

    @functools.wraps(function)
    def quietly(*args):
        with warnings.catch_warnings(action="ignore"):
            return function(*args)

    return quietly


def cut(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:300])


DAMAGES = {
    "a file that is cut off": (lambda folder: cut(folder, "__1_0.distcp"), "Error"),
    "no file of rank 1": (lambda folder: (folder / "__1_0.distcp").unlink(), "No such file"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "metadata is None"),
    "metadata that is cut off": (lambda folder: cut(folder, ".metadata"), "metadata is None"),
}


@quiet
def load_damaged(folder):
    """Save, damage a copy in each way, and load; then what is whole."""
    whole = Path(folder, "whole")
    dcp.save(sharded(*trained(0)), checkpoint_id=whole)
    model, optim = trained(1)
    before, refused = numbers(model, optim), {}
    for name, (damage, _) in DAMAGES.items():
        copy = Path(folder, name)
        if dist.get_rank() == 0:
            damage(Path(shutil.copytree(whole, copy)))
        dist.barrier()
        with pytest.raises(dcp.CheckpointException) as error:
            load(copy, model, optim)
        refused[name] = str(error.value)
    for shapes, text in ((((3, 5), (5, 2), (2, 1)), "Missing key"), (((3, 4), (4, 2)), "Size mismatch")):
        with pytest.raises(dcp.CheckpointException, match=text):
            load(whole, *trained(1, shapes))
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(model, optim), strict=True))
    load(whole, model, optim)
    assert all(torch.equal(one, other) for one, other in zip(numbers(*trained(0)), numbers(model, optim), strict=True))
    return refused


def test_damaged_directories_are_refused_and_change_nothing(worlds, tmp_path):
    for refused in worlds(size=2).run(load_damaged, str(tmp_path)):
        for name, (_, text) in DAMAGES.items():
            assert text in refused[name], name


@quiet
def save_on_a_full_disk(folder):
    """Save a step that no longer fits beside one that did, and load that one."""
    model, optim = trained(0)
    dcp.save(sharded(model, optim), checkpoint_id=f"{folder}/step-1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # a write beyond it fails, as on a full disk
        with pytest.raises(dcp.CheckpointException, match="File too large"):
            dcp.save(sharded(model, optim), checkpoint_id=f"{folder}/step-2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert [path.parent.name for path in Path(folder).glob("*/.metadata")] == ["step-1"]
    again, its_optim = trained(1)
    load(f"{folder}/step-1", again, its_optim)
    assert all(torch.equal(a, b) for a, b in zip(numbers(model, optim), numbers(again, its_optim), strict=True))


def test_a_disk_that_is_full_costs_the_new_checkpoint_only(worlds, tmp_path):
    worlds(size=2).run(save_on_a_full_disk, str(tmp_path))


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def test_files_that_run_code_or_are_damaged(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"weight": Hostile(tmp_path / "made")}, file)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
    assert not (tmp_path / "made").exists()
    torch.save({"weight": torch.ones(64)}, file)
    assert zipfile.ZipFile(file).testzip() is None
    data = bytearray(file.read_bytes())
    data[data.find(b"\x00\x00\x80\x3f" * 8) + 3] ^= 0x80
    file.write_bytes(data)
    assert zipfile.ZipFile(file).testzip()  # torch.load does not look
    cut(tmp_path, "state.pt")
    with pytest.raises(RuntimeError, match="failed"):
        torch.load(file, weights_only=True)


@pytest.mark.world(2)
@pytest.mark.parametrize("path", ["composable", "wrapper"])
def test_every_mismatch_of_a_full_state_has_its_plain_name(world, path):
    model, _ = trained(0, path=path)
    other, _ = trained(0, shapes=((3, 4), (4, 2)), path=path)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(_state(other, StateDictType.FULL_STATE_DICT))
    # The last bias has the same shape in both.
    assert re.findall(r"size mismatch for ([^:]*):", str(error.value)) == ["0.weight", "0.bias", "1.weight"]


@pytest.mark.world(2)
@pytest.mark.parametrize("path", ["composable", "wrapper"])
def test_moments_at_which_nothing_can_be_loaded(world, path):
    model, optim = trained(0, path=path)
    states = {form: _state(model, form) for form in (StateDictType.FULL_STATE_DICT, SHARDED)}
    saved = optim_state_dict(model, optim)
    before = numbers(model, optim)
    for form, state in states.items():
        with state_dict_type(model, form):
            with no_sync(model), pytest.raises(TrainingStateError, match="inside no_sync"):
                model.load_state_dict(state)
            with unshard_params(model), pytest.raises(UnshardConflictError, match="inside summon_full_params"):
                model.load_state_dict(state)
    for context, text in ((no_sync(model), "inside no_sync"), (unshard_params(model), "outside of forward")):
        with context, pytest.raises(TrainingStateError, match=text):
            _loads(model, optim, saved)()
    raised = []

    def loading(gradient):
        for load_it in (
            lambda: model.load_state_dict(states[StateDictType.FULL_STATE_DICT]),
            _loads(model, optim, saved),
        ):
            with pytest.raises((UnshardConflictError, TrainingStateError)) as error:
                load_it()
            raised.append(str(error.value))

    output = model(torch.ones(2, 3, dtype=torch.float64))
    output.register_hook(loading)
    output.sum().backward()
    assert len(raised) == 2
    optim.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(model, optim), strict=True))
    for form, state in states.items():
        with state_dict_type(model, form):
            model.load_state_dict(state)
    optim_state_dict_to_load(model, optim, saved, load_directly=True)
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(model, optim), strict=True))


def _state(model, form):
    with state_dict_type(model, form):
        return model.state_dict()


def _loads(model, optim, saved):
    return lambda: optim_state_dict_to_load(model, optim, saved, load_directly=True)
