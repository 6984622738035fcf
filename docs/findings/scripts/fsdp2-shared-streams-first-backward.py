"""FSDP2: the first backward through two models that share their streams raises IndexError.

Run with torch alone: python fsdp2-shared-streams-first-backward.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard, share_comm_ctx


def outcome(mesh: dist.device_mesh.DeviceMesh, forward_first: bool) -> str:
    torch.manual_seed(0)
    first, second = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.Linear(4, 4)
    for module in (*first, first, second):
        fully_shard(module, mesh=mesh)
    share_comm_ctx([first, second])
    if forward_first:
        with torch.no_grad():
            second(first(torch.ones(2, 4)))
    try:
        second(first(torch.ones(2, 4))).sum().backward()
    except IndexError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    at_once, later = outcome(mesh, forward_first=False), outcome(mesh, forward_first=True)
    if rank == 0:
        print(f"the first backward: {at_once}; after a forward without gradients: {later}")
    assert "IndexError" in at_once, "fixed in this torch"
    assert later == "no error"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
