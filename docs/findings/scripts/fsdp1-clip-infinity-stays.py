"""FSDP1: a clip by the infinity norm stays in the norm of every later one. Run: python fsdp1-clip-infinity-stays.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def norms(elements: int, norm_type: float) -> list[float]:
    """Two norms of one model: of gradients of 8, and of gradients of 1."""
    layer = nn.Linear(elements, 1, bias=False)
    model = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
    told = []
    for size in (8.0, 1.0):
        model.zero_grad()
        model(torch.full((1, elements), size)).sum().backward()
        told.append(model.clip_grad_norm_(100.0, norm_type).item())
    return told


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {(elements, norm): norms(elements, norm) for elements in (2, 1) for norm in (2.0, float("inf"))}
    if rank == 0:
        for (elements, norm), found in told.items():
            print(f"{elements} elements on 2 ranks, norm {norm}: {found}")
    assert told[2, float("inf")] == [8.0, 1.0]
    assert told[1, 2.0] == [8.0, 1.0]
    assert told[1, float("inf")] == [8.0, 8.0], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
