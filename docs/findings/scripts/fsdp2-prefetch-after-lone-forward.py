"""FSDP2: a backward after a forward that had none gathers a unit once more, and nobody reads it.

Run with torch alone: python fsdp2-prefetch-after-lone-forward.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

GATHERS: list[int] = []


def count(method: str) -> None:
    """Notes each call of one method of process groups."""
    original = getattr(dist.ProcessGroup, method, None)

    def call(*arguments: object, **options: object) -> object:
        GATHERS.append(1)
        return original(*arguments, **options)

    if original is not None:
        setattr(dist.ProcessGroup, method, call)


def gathers_after(evaluations: int) -> list[int]:
    """Gathers of two micro-batches after so many forwards without gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for _ in range(evaluations):
            model(torch.ones(2, 4))
    counted = []
    for _ in range(2):
        GATHERS.clear()
        model(torch.ones(2, 4)).sum().backward()
        counted.append(len(GATHERS))
    return counted


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for method in ("_allgather_base", "all_gather_single"):
        count(method)
    for evaluations in (0, 1, 3):
        counted = gathers_after(evaluations)
        if rank == 0:
            print(f"gathers of two micro-batches over two units, after {evaluations} evaluations: {counted}")
        assert counted == [4 if evaluations == 0 else 5, 4], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
