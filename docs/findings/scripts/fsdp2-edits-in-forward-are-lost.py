"""FSDP2: what a module changes of its own weight in forward is gone after it. FSDP1 raises.

Run with torch alone: python fsdp2-edits-in-forward-are-lost.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Clipping(nn.Linear):
    """Keeps its weights within a tenth of zero."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(rows)


def largest(trained: nn.Module) -> float:
    """The largest weight after a forward and its backward."""
    trained(torch.ones(2, 4)).sum().backward()
    weight = next(trained.parameters())
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).abs().max().item()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    one, many, older = (Clipping(4, 4, bias=False) for _ in range(3))
    sharded = fully_shard(many, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    found = {"one process": largest(one), "FSDP2": largest(sharded)}
    try:
        largest(FullyShardedDataParallel(older, use_orig_params=True, device_id=torch.device("cpu")))
        refused = False
    except RuntimeError:
        refused = True
    if rank == 0:
        print("the largest of weights that forward clips to 0.1:", found, "FSDP1 raises:", refused)
    assert found["one process"] <= 0.1 + 1e-6
    assert found["FSDP2"] > 0.2, "fixed in this torch: what forward changed is kept"
    assert refused, "FSDP1 says nothing in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
