"""FSDP2: a frozen unit that is recomputed inside another recomputation stays gathered after backward.

    python fsdp2-frozen-unit-in-nested-checkpoints.py

It asserts that the defect is there.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

RANKS = 2


class Bias(nn.Module):
    """Adds a frozen vector: nothing of it is saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add it."""
        return x + self.weight


class Recomputed(nn.Module):
    """Runs a module, and once more in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return checkpoint(self.inner, x, use_reentrant=False)


def train(rank: int, path: str) -> None:
    """Train one micro-batch, and look at what backward leaves gathered."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    frozen = fully_shard(Recomputed(Bias()))
    model = fully_shard(Recomputed(nn.Sequential(nn.Linear(8, 8), frozen)))
    model(torch.ones(2, 8)).sum().backward()
    gathered = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    print(f"rank {rank}: gathered after backward: {gathered or 'nothing'}", flush=True)
    assert gathered, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store",), nprocs=RANKS)
