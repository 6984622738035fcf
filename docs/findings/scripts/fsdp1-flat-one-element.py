"""FSDP1 with flat parameters: a unit of one element adds up wrong gradients over two backwards.

Run with torch alone: python fsdp1-flat-one-element.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def gradient_of_two_backwards(original: bool, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    scale = FullyShardedDataParallel(Scale(), use_orig_params=original, device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(2, 1), scale), use_orig_params=original, device_id=torch.device("cpu")
    )
    model(x).sum().backward()
    model(x).sum().backward()
    held = [p.grad for p in scale.parameters() if p.grad is not None and p.grad.numel()]
    total = sum(held) if held else torch.zeros(1)
    dist.all_reduce(total)  # the one element lies on one rank, the other has padding or nothing
    return total


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x = torch.full((2, 2), float(rank + 1))
    right, wrong = (gradient_of_two_backwards(original, x) for original in (True, False))
    if rank == 0:
        print(f"gradient of two equal backwards: {right.item():.4f} with use_orig_params, {wrong.item():.4f} without")
    # Two equal terms: the first one counts half.
    assert torch.allclose(wrong, 0.75 * right), "fixed in this torch: both count alike"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
