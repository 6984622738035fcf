"""FSDP2 over tensor parallelism: clipping raises where a module is left out of the tensor-parallel plan.

Run with torch alone: python fsdp2-tensor-parallel-clip-two-meshes.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def all_cut() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def one_left_out() -> nn.Sequential:
    return all_cut().append(nn.LayerNorm(4))


def clip(model: nn.Sequential, mesh: dist.DeviceMesh) -> str:
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 4)).square().sum().backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except RuntimeError as error:
        return str(error)[:58]
    return "clipped"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with_all_cut, with_one_left_out = clip(all_cut(), mesh), clip(one_left_out(), mesh)
    if rank == 0:
        print(f"all modules are cut: {with_all_cut}; a norm is left out: {with_one_left_out}")
    assert with_all_cut == "clipped"
    assert with_one_left_out == "All operands in aten.stack.default must have the same mesh", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=4, start_method="fork")
