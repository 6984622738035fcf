"""A deep copy of DDP that is made inside no_sync never reduces its gradients.

Run with torch alone: python ddp-copied-in-no-sync.py
"""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gradients(model: nn.Module, rank: int) -> list[float]:
    model(torch.full((1, 1), float(rank + 1))).sum().backward()
    mine = next(model.parameters()).grad.reshape(1)
    both = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(both, mine)
    return [value.item() for value in both]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    outside = copy.deepcopy(model)
    with model.no_sync():
        inside = copy.deepcopy(model)
    told = {name: gradients(each, rank) for name, each in (("model", model), ("outside", outside), ("inside", inside))}
    if rank == 0:
        print(told)
    assert told["model"] == told["outside"] == [1.5, 1.5]
    assert told["inside"] == [1.0, 2.0], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
