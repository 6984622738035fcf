"""FSDP2 over tensor parallelism: a backward, and full state, raise on ranks whose part of a weight is empty.

Run with torch alone: python fsdp2-tensor-parallel-empty-part.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate


def train(inputs: int, mesh: dist.DeviceMesh, *, shard: bool) -> str:
    model = nn.Sequential(nn.Linear(inputs, 4, dtype=torch.float64), nn.Tanh())
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    if shard:
        fully_shard(model, mesh=mesh["dp"])
    try:
        model(torch.ones(2, inputs, dtype=torch.float64)).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "trained"


def gathered(inputs: int, mesh: dist.DeviceMesh) -> str:
    """What the full weight is on this rank."""
    model = nn.Linear(inputs, 4, bias=False)
    parallelize_module(model, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"])
    try:
        return f"full weight of {tuple(model.weight.full_tensor().shape)}"
    except RuntimeError:
        return "full weight raises"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = train(2, mesh, shard=True), train(1, mesh, shard=False), train(1, mesh, shard=True)
    print(f"rank {rank}: two columns: {found[0]}; one, without FSDP2: {found[1]}; one: {found[2]}")
    # The first rank of "tp" has the one column, the other none.
    expected = "trained" if mesh["tp"].get_local_rank() == 0 else "_chunk_cat expects non-empty tensor"
    assert found[:2] == ("trained", "trained")
    assert found[2] == expected, "fixed in this torch"
    assert gathered(2, mesh) == "full weight of (4, 2)"
    # Last: the ranks that raise leave the others waiting, until they end.
    assert gathered(1, mesh) == "full weight raises", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=4, start_method="fork")
