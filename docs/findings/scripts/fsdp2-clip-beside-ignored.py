"""FSDP2: clip_grad_norm_ raises if the model has trained parameters that fully_shard was told to ignore.

Run with torch alone: python fsdp2-clip-beside-ignored.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params=set(model[0].parameters()))
    model(torch.ones(2, 4)).sum().backward()
    told = ""
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        told = str(error)
    if rank == 0:
        print(f"clipping raises: {told}" if told else "clipping works")
    assert "mixed torch.Tensor and DTensor" in told, "fixed in this torch: ignored parameters count in the norm"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
