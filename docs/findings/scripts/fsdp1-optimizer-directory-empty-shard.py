"""A directory with FSDP1's optimizer state cannot be loaded where a rank has no element of some parameter.

Run with torch alone: python fsdp1-optimizer-directory-empty-shard.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def trained(device_mesh: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))  # the second layer lies on rank 0 alone
    model = FullyShardedDataParallel(
        plain, device_mesh=device_mesh, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def load(folder: str, planner: object, device_mesh: object = None) -> str:
    state = {"optimizer": get_optimizer_state_dict(*trained(device_mesh))}
    dcp.save(state, checkpoint_id=folder)
    try:
        dcp.load(state, checkpoint_id=folder, planner=planner)
    except dcp.CheckpointException as refused:
        return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in refused.failures.items())
    return "loads"


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    default = load(f"{folder}/default", None)
    unflattened = load(f"{folder}/unflattened", dcp.DefaultLoadPlanner(flatten_sharded_tensors=False))
    meshed = load(f"{folder}/meshed", None, dist.init_device_mesh("cpu", (2,)))
    if rank == 0:
        print(f"by default: {default}\nflatten_sharded_tensors=False: {unflattened}\nwith a mesh: {meshed}")
    assert unflattened == meshed == "loads"
    assert default == "rank 1: Missing key in checkpoint state_dict: optimizer.param_groups.", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
