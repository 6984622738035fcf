"""FSDP1 with flat parameters: a backward in which a unit gets no gradient drops the gradient that it had.

Run with torch alone: python fsdp1-flat-gradient-dropped.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def wrap(module: nn.Module, original: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))


class Sometimes(nn.Module):
    def __init__(self, original: bool) -> None:
        super().__init__()
        self.sometimes = nn.Linear(2, 2)
        self.always = wrap(nn.Linear(2, 2), original)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return self.always(self.sometimes(x) if used else x)


def has_gradient(model: FullyShardedDataParallel) -> bool:
    # The root's own parameters are those of `sometimes`.
    return any(p.grad is not None for name, p in model.named_parameters() if "always" not in name)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x = torch.full((3, 2), float(rank + 1))
    for original in (True, False):
        torch.manual_seed(0)
        model = wrap(Sometimes(original), original)
        model(x, used=True).sum().backward()
        first = has_gradient(model)
        model(x, used=False).sum().backward()
        second = has_gradient(model)
        if rank == 0:
            print(
                f"use_orig_params={original}: gradient after the backward that used it {first}, after the next {second}"
            )
            assert (first, second) == (True, original), "fixed in this torch: the gradient is still there"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
