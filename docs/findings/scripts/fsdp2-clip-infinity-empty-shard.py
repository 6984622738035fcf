"""FSDP2: clip_grad_norm_ with p = inf raises on a rank with an empty shard; the others go on and wait.

Run with torch alone: python fsdp2-clip-infinity-empty-shard.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def norm(p: float) -> str:
    """The first step of clipping: this rank's norms. What follows is the collective that an error leaves alone."""
    model = fully_shard(nn.Linear(4, 1, bias=False), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 4)).sum().backward()
    try:
        total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], p)
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:76]}"
    return f"a {type(total).__name__}"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    assert norm(2.0) == "a DTensor"
    told = norm(float("inf"))
    both: list[str] = ["", ""]
    dist.all_gather_object(both, told)
    if rank == 0:
        print(f"p = inf, rank 0 (holds the row): {both[0]}; rank 1 (holds nothing): {both[1]}")
    assert both[0] == "a DTensor"
    assert "infinity norm on an empty tensor" in both[1], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
