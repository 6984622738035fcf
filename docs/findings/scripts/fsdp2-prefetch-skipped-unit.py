"""FSDP2: a unit that is prefetched by hand and then skipped stays gathered, and computes with old weights after a step.

Run with torch alone: python fsdp2-prefetch-skipped-unit.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) if use else x


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Branching()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for unit in (model.trunk, model.branch, model):
        fully_shard(unit, mesh=mesh)
    model.trunk.set_modules_to_forward_prefetch([model.branch])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    x = torch.ones(2, 4)
    model(x, True).sum().backward()  # the branch has a gradient, which the step uses
    with torch.no_grad():
        model(x, False)  # the branch is gathered ahead, and not used
    optimizer.step()
    with torch.no_grad():
        model.reshard()
        model.trunk.reshard()
        found = model(x, True)
        model.branch.reshard()
        right = model(x, True)
    gap = (found - right).abs().max().item()
    if rank == 0:
        print(f"after the step the branch's output is off by {gap:.3g}")
    assert gap > 1e-3, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
