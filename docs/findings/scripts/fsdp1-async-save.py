"""async_save refuses what FSDP1 without a mesh gives: ShardedTensors cannot be staged.

Run with torch alone: python fsdp1-async-save.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def save(folder: str, device_mesh: object) -> str:
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), device_mesh=device_mesh, use_orig_params=True, device_id=torch.device("cpu")
    )
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=f"{folder}/sync")
    try:
        dcp.async_save(state, checkpoint_id=f"{folder}/async").result()
    except RuntimeError as error:
        return str(error)
    return "saves"


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    without, meshed = save(f"{folder}/without", None), save(f"{folder}/meshed", dist.init_device_mesh("cpu", (2,)))
    if rank == 0:
        print(f"without a mesh: {without[:60]}...\nwith a mesh: {meshed}")
    assert meshed == "saves"
    assert "torch function 'data_ptr'" in without, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
