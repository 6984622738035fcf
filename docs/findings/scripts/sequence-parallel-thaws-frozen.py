"""SequenceParallel makes frozen parameters trainable.

Run with torch alone: python sequence-parallel-thaws-frozen.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).requires_grad_(False)
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel()})
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if rank == 0:
        print(flags)
    assert not flags["1.weight"]
    assert flags["0.weight"], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
