"""FSDP1 with original parameters, and FSDP2: a step between a forward and its backward goes unnoticed.

One process raises "modified by an inplace operation". So does FSDP1 with flat parameters.
Run with torch alone: python outdated-backward-is-not-refused.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def fsdp1(*, flat: bool) -> nn.Module:
    return FullyShardedDataParallel(model(), use_orig_params=not flat, device_id=torch.device("cpu"))


def refuses(trained: nn.Module) -> bool:
    """Whether the second backward, which needs weights that are no more, raises."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    trained(torch.ones(2, 4)).sum().backward()
    loss = trained(torch.ones(2, 4)).sum()
    optimizer.step()
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError:
        return True
    return False


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    found = {
        "one process": refuses(model()),
        "FSDP1": refuses(fsdp1(flat=False)),
        "FSDP2": refuses(fully_shard(model(), mesh=mesh)),
        "FSDP1, flat": refuses(fsdp1(flat=True)),
    }
    if rank == 0:
        print("a backward after a step is refused:", found)
    expected = {"one process": True, "FSDP1": False, "FSDP2": False, "FSDP1, flat": True}
    assert found == expected, "otherwise in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
