"""FSDP2: `reshard_after_forward=2` on four ranks, with shards of the last dimension: IndexError in the second gather.

    python fsdp2-fewer-ranks-last-dimension.py

It asserts that the defect is there.
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
    raised = ""
    try:
        layer(torch.ones(2, 8)).sum().backward()
    except IndexError as error:
        raised = str(error)
    print(f"rank {rank}: IndexError: {raised}", flush=True)
    assert raised, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store",), nprocs=RANKS)
