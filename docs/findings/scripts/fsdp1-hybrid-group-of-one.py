"""FSDP1 HYBRID_SHARD over a mesh of n replicas with shard groups of one rank: gradients are never averaged.

Run with torch alone: python fsdp1-hybrid-group-of-one.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model(torch.full((1, 1), float(rank + 1))).sum().backward()  # this rank's gradient is rank + 1, their mean 1.5
    on_ranks = [torch.empty(1) for _ in range(2)]
    dist.all_gather(on_ranks, next(model.parameters()).grad.detach().reshape(1))
    found = [grad.item() for grad in on_ranks]
    if rank == 0:
        print(f"expected the mean 1.5 on both ranks, got {found}: each rank's own gradient, divided by 2")
    assert found == [0.5, 1.0], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
