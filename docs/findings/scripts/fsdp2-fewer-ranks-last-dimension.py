"""FSDP2: `reshard_after_forward=2` on four ranks, with shards of the last dimension: IndexError in the second gather.

    python fsdp2-fewer-ranks-last-dimension.py

Exit code 1: the defect shows. 0: the gradients are those of one process.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

RANKS = 4


def train(rank: int, path: str) -> None:
    """Wrap one layer so, and train one micro-batch."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    fully_shard(layer, reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    try:
        layer(torch.ones(2, 8)).sum().backward()
    except IndexError as error:
        print(f"rank {rank}: IndexError: {error}", flush=True)
        raise SystemExit(1) from None
    assert bool((layer.weight.grad.full_tensor() == 2).all()), "two rows of ones, alike on all ranks"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(train, (f"{folder}/store",), nprocs=RANKS)
        except mp.ProcessExitedException:
            raise SystemExit(1) from None
    print("no error")
