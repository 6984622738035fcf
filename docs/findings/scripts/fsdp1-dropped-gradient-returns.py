"""FSDP1: a gradient that is dropped comes back, as zeros, with the next backward that does not use its parameter.

Run with torch alone: python fsdp1-dropped-gradient-returns.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, rows: torch.Tensor, *, use: bool) -> torch.Tensor:
        return self.always(rows) + self.sometimes(rows) if use else self.always(rows)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FSDP(Gated(), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.randn(2, 5), use=True).sum().backward()
    for parameter in model.module.sometimes.parameters():
        parameter.grad = None
    model(torch.randn(2, 5), use=False).sum().backward()
    gradients = [parameter.grad for parameter in model.module.sometimes.parameters()]
    print(f"rank {rank}: gradients that were dropped, and not used since: {gradients}")
    every: list[bool] = [False] * 2
    dist.all_gather_object(every, any(gradient is not None and gradient.numel() > 0 for gradient in gradients))
    assert any(every), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
