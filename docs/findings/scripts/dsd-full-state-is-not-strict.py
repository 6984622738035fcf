"""set_model_state_dict(full_state_dict=True, strict=True) loads a state that lacks a parameter of an FSDP2 model.

Run with torch alone: python dsd-full-state-is-not-strict.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

FULL = StateDictOptions(full_state_dict=True, strict=True)


def load(wrap, change) -> str:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    state = dict(get_model_state_dict(model, options=FULL))
    change(state)
    try:
        set_model_state_dict(model, state, options=FULL)
    except RuntimeError:
        return "refused"
    return "loaded"


def one_less(state) -> None:
    del state["1.weight"]


def one_more(state) -> None:
    state["9.weight"] = torch.zeros(4, 4)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {
        f"{wrap.__name__} {change.__name__}": load(wrap, change)
        for wrap in (fully_shard, DistributedDataParallel)
        for change in (one_less, one_more)
    }
    if rank == 0:
        print(told)
    assert told.pop("fully_shard one_less") == "loaded", "fixed in this torch"
    assert set(told.values()) == {"refused"}
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
