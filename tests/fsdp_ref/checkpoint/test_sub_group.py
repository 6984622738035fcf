"""Ranks 1 and 2 of three shard, save and load among themselves; rank 0 has no part in it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_ref import StateDictType, fully_shard, optim_state_dict, optim_state_dict_to_load, state_dict_type

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def trained(seed, group):
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double(), process_group=group)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def collect(model, optim):
    return {"model": model.state_dict(), "optimizer": optim_state_dict(model, optim)}


def take(model, optim, state):
    model.load_state_dict(state["model"])
    optim_state_dict_to_load(model, optim, state["optimizer"], load_directly=True)


def numbers(model, optim):
    entries = [entry for state in optim.state.values() for entry in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *entries)]


def save_and_load(folder):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    with warnings.catch_warnings(action="ignore"):
        model, optim = trained(0, group)
        want = numbers(model, optim)
        if dist.get_rank() == 1:
            torch.save(collect(model, optim), Path(folder, "state.pt"))
        else:
            collect(model, optim)
        with state_dict_type(model, SHARDED):
            dcp.save(collect(model, optim), checkpoint_id=f"{folder}/shards", process_group=group)
        other, its_optim = trained(1, group)
        with state_dict_type(other, SHARDED):
            state = collect(other, its_optim)
            dcp.load(state, checkpoint_id=f"{folder}/shards", process_group=group)
            take(other, its_optim, state)
        assert all(torch.equal(a, b) for a, b in zip(want, numbers(other, its_optim), strict=True))
        again, its_optim = trained(2, group)
        take(again, its_optim, torch.load(Path(folder, "state.pt"), weights_only=True))
        assert all(torch.equal(a, b) for a, b in zip(want, numbers(again, its_optim), strict=True))
    dist.destroy_process_group(group)


def test_a_group_without_rank_zero_saves_and_loads(worlds, tmp_path):
    worlds(size=3).run(save_and_load, str(tmp_path))
