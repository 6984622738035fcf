"""FSDP1 and torch.distributed.checkpoint: a full state forgets the versions of modules, which then convert it as an old one.

Run with torch alone: python module-versions-are-lost.py
"""

import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

FULL = StateDictOptions(full_state_dict=True)


class Scaled(nn.Linear):
    """Its first version saved half of the weight, and its second doubles what the first saved."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None or metadata["version"] < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def new() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(4, 4))


def factor(save, load, wrap) -> float:
    """Return how many times as large the weight of a plain model is that loads what a wrapped one saved."""
    wrapped, plain = wrap(new()), new()
    before = plain[0].weight.detach().clone()
    load(plain, save(wrapped))
    return float((plain[0].weight.detach() / before).mean())


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    own = lambda model: model.state_dict()
    by_torch = lambda model: get_model_state_dict(model, options=FULL)
    fsdp1 = lambda model: FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    load = lambda model, state: model.load_state_dict(state)
    load_by_torch = lambda model, state: set_model_state_dict(model, state, options=FULL)

    def with_versions(model):
        state = OrderedDict(by_torch(model))
        state._metadata = new().state_dict()._metadata
        return state

    for name, wrap, save, loads, lost in (
        ("DDP, the module's state_dict", DistributedDataParallel, lambda model: own(model.module), load, False),
        ("FSDP1, state_dict", fsdp1, own, load, True),
        ("FSDP2, get_model_state_dict", fully_shard, by_torch, load, True),
        ("FSDP2, with the versions of a plain model", fully_shard, with_versions, load, False),
        ("FSDP2, both functions", fully_shard, by_torch, load_by_torch, True),
    ):
        times = factor(save, loads, wrap)
        if rank == 0:
            print(f"{name}: the weight is {times:g} times as large")
        assert (times == 2) == lost, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
