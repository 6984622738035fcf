"""FSDP2 over tensor parallelism: full state is saved, and cannot be loaded where the ranks do not divide a layer's rows.

Run with torch alone: python fsdp2-tensor-parallel-uneven-rows.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

FULL = StateDictOptions(full_state_dict=True)


def save_and_load(rows: int, mesh: dist.DeviceMesh) -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, rows)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    saved = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(saved[name], value) for name, value in want.items())
    try:
        set_model_state_dict(model, saved, options=FULL)
    except AssertionError as error:
        return f"AssertionError({str(error)!r})"
    return "loaded"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {rows: save_and_load(rows, mesh) for rows in (8, 6, 7)}
    if rank == 0:
        print(found)
    assert found[8] == "loaded"
    assert found[6] == found[7] == "AssertionError('')", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=4, start_method="fork")
