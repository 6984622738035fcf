"""FSDP1 with flat parameters, SHARD_GRAD_OP: units whose outputs are not in the loss stay gathered after backward.

Run with torch alone: python fsdp1-flat-outside-loss-stays-gathered.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Aside(nn.Module):
    """Runs two units and drops what they give."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.aside = nn.Sequential(wrap(nn.Linear(2, 2)), wrap(nn.Linear(2, 2)))
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside(x)
        return self.last(x)


def bytes_kept(original: bool) -> int:
    """Return the bytes of the first unit's full parameters that are there after a backward."""

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        strategy, cpu = ShardingStrategy.SHARD_GRAD_OP, torch.device("cpu")
        return FullyShardedDataParallel(module, use_orig_params=original, sharding_strategy=strategy, device_id=cpu)

    model = wrap(Aside(wrap))
    model(torch.ones(3, 2)).sum().backward()
    return model.aside[0]._handle.flat_param._full_param_padded.untyped_storage().nbytes()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    original, flat = bytes_kept(original=True), bytes_kept(original=False)
    if rank == 0:
        print(f"bytes of full parameters after backward: {original} with use_orig_params, {flat} without")
    assert original < flat, "fixed in this torch: they are freed"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
