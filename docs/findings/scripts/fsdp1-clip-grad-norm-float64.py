"""FSDP1: clip_grad_norm_ of a float64 model raises. Run with torch alone: python fsdp1-clip-grad-norm-float64.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def clip(dtype: torch.dtype) -> str:
    model = FullyShardedDataParallel(nn.Linear(4, 4, dtype=dtype), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.randn(2, 4, dtype=dtype)).sum().backward()
    try:
        model.clip_grad_norm_(1.0)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "clips"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {dtype: clip(dtype) for dtype in (torch.float32, torch.float64)}
    if rank == 0:
        print(told)
    assert told[torch.float32] == "clips"
    assert "without narrowing" in told[torch.float64], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
