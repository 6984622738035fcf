"""FSDP1: the buffers of a unit without parameters are saved in the low dtype, those of other units in their own.

Run with torch alone: python fsdp1-buffers-of-bare-units.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


class Table(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.register_buffer("table", torch.full((3,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.table


def wrap(module: nn.Module) -> nn.Module:
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    return FullyShardedDataParallel(module, mixed_precision=low, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = wrap(nn.Sequential(wrap(Table(nn.Linear(3, 3))), wrap(Table())))
    model(torch.ones(2, 3)).sum().backward()
    state = model.state_dict()
    if rank == 0:
        print({name: value.dtype for name, value in state.items()})
    assert state["0.table"].dtype is torch.float32
    assert state["1.table"].dtype is torch.bfloat16, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
