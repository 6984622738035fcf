"""FSDP1: a unit that is frozen after no_sync keeps each rank's own gradient, and the next backward does not reduce it.

Run with torch alone: python fsdp1-no-sync-then-frozen.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def wrap(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    frozen = wrap(nn.Linear(4, 4, bias=False))
    model = wrap(nn.Sequential(nn.Linear(4, 4), frozen))
    x = torch.full((2, 4), float(rank + 1))
    with model.no_sync():
        model(x).sum().backward()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    model(x).sum().backward()
    flat = frozen._handle.flat_param
    grad = flat.grad.detach()
    on_ranks = [torch.empty_like(grad) for _ in range(2)]
    dist.all_gather(on_ranks, grad)
    if rank == 0:
        print(
            f"the frozen unit has a gradient of {grad.numel()} elements for a shard of {flat.numel()}, on each rank its own"
        )
    assert not torch.equal(*on_ranks), "fixed in this torch: it is reduced"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
