"""DDP: a model cannot be wrapped if its only parameter of some dtype is a transposed column.

Run with torch alone: python ddp-lone-transposed-column.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrapping(*parameters: torch.Tensor) -> str:
    """What comes of wrapping a model with these parameters."""
    model = nn.Module()
    for place, tensor in enumerate(parameters):
        model.register_parameter(f"weight{place}", nn.Parameter(tensor))
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        return str(error)
    return "runs"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    row = torch.ones(4, 1).t()  # shape (1, 4), strides (1, 1): one stretch of memory
    outcomes = {
        "a row": wrapping(torch.ones(1, 4)),
        "a transposed column": wrapping(row),
        "a transposed matrix": wrapping(torch.ones(4, 2).t()),
        "a transposed column and another parameter": wrapping(row, torch.ones(3)),
    }
    if rank == 0:
        for name, outcome in outcomes.items():
            print(f"{name}: {outcome[:110]}")
    failing = [name for name, outcome in outcomes.items() if outcome != "runs"]
    assert failing == ["a transposed column"], "another outcome than in torch 2.13"
    assert "refer to a single memory location" in outcomes["a transposed column"]
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
