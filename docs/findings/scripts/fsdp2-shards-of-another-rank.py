"""A state in shards that another rank saved loads into an FSDP2 model without an error: the weights' rows change places.

Run with torch alone: python fsdp2-shards-of-another-rank.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(2, 4, bias=False))
    before = model.weight.full_tensor()
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    dist.barrier()
    model.load_state_dict(torch.load(f"{folder}/rank{1 - rank}.pt", weights_only=False), strict=True)
    after = model.weight.full_tensor()
    if rank == 0:
        print("saved:", before.tolist(), "loaded:", after.tolist())
    assert torch.equal(after, torch.cat([before[2:], before[:2]])), "refused or put right in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(main, (directory,), nprocs=2, start_method="fork")
