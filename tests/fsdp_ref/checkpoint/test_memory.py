"""Saving and loading need at most one unit of memory beside the model and the state that is asked for.

Counted is what torch's allocator gives and takes while a state is saved or loaded, as the profiler records it. Nothing travels: a
backend's threads give its memory back when they come to it, and among more than two ranks gloo's gathers need a second buffer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from fsdp_ref.comm.collectives import Collectives, Done
from fsdp_ref.wrap import ModuleWrapPolicy

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
UNITS, SIZE, ROWS = 6, 192, 191  # 96 and 95 rows
UNIT = (ROWS * SIZE + SIZE * ROWS) * 8
SMALL = UNIT // 4  # exchanged descriptions, counters, padding: less than one parameter


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(SIZE, ROWS, bias=False)
        self.down = nn.Linear(ROWS, SIZE, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def trained(path):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Unit() for _ in range(UNITS))).double()
    policy = ModuleWrapPolicy({Unit})
    if path == "composable":
        model = fully_shard(plain, policy=policy)
    else:
        model = FullyShardedDataParallel(plain, auto_wrap_policy=policy, use_orig_params=path == "wrapper")
    optim = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(2, SIZE, dtype=torch.float64)).sum().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def most_beside(file, action):
    """Return what the action gives, and the most bytes of tensors that there were beside those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = action()
    profile.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    assert most, "the profiler recorded no memory"
    return result, most


@pytest.mark.world([2, 3], backend="fake")
@pytest.mark.parametrize("path", ["wrapper", "flat", "composable"])
def test_one_unit_beside_the_state(path, tmp_path, monkeypatch):
    # torch's fake group takes seconds for an uneven exchange: it repeats what is sent, element by element.
    monkeypatch.setattr(Collectives, "exchange", lambda *_: Done())
    model, optim = trained(path)
    file, rank = Path(tmp_path) / f"trace{dist.get_rank()}.json", dist.get_rank()
    whole, ranks = UNITS * UNIT, dist.get_world_size()
    model.state_dict()  # what training left, or is made once, is not to be counted
    # By Adam's two moments, of which one entry of one unit is whole, and this rank's part of it.
    rank0_only = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with fsdp_ref.state_dict_type(model, FULL, *rank0_only):
        state, most = most_beside(file, model.state_dict)
        assert most <= (whole if rank == 0 else 0) + UNIT + SMALL
        moments, most = most_beside(file, lambda: fsdp_ref.optim_state_dict(model, optim))
        assert most <= (2 * whole if rank == 0 else 0) + UNIT + UNIT // ranks + SMALL
        to_load, most = most_beside(file, lambda: fsdp_ref.optim_state_dict_to_load(model, optim, moments))
        assert most <= 2 * whole // ranks + UNIT + SMALL
        del state, moments, to_load
    with fsdp_ref.state_dict_type(model, SHARDED):
        state, most = most_beside(file, model.state_dict)
        assert most <= whole // ranks + UNIT + SMALL
        _, most = most_beside(file, lambda: model.load_state_dict(state))
        assert most <= UNIT + SMALL
        moments, most = most_beside(file, lambda: fsdp_ref.optim_state_dict(model, optim))
        assert most <= 2 * whole // ranks + UNIT + UNIT // ranks + SMALL
        _, most = most_beside(file, lambda: fsdp_ref.optim_state_dict_to_load(model, optim, moments))
        assert most <= 2 * whole // ranks + UNIT + SMALL
