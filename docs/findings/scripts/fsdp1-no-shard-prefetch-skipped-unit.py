"""FSDP1 NO_SHARD with forward_prefetch: after a forward that skips a unit, that unit's training is wrong.

Run with torch alone: python fsdp1-no-shard-prefetch-skipped-unit.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, use_branch: bool) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) if use_branch else x


def fresh() -> Skipping:
    torch.manual_seed(0)
    return Skipping()


def train(model: nn.Module) -> list[float]:
    """The sum of the outputs of four steps, the second of which leaves the branch out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    seen = []
    for use_branch in (True, False, True, True):
        output = model(torch.randn(2, 4), use_branch=use_branch)
        seen.append(round(output.sum().item(), 4))
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def wrapped(model: Skipping, strategy: ShardingStrategy, *, forward_prefetch: bool) -> nn.Module:
    def unit(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=strategy,
            forward_prefetch=forward_prefetch,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    model.trunk, model.branch = unit(model.trunk), unit(model.branch)
    return unit(model)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    alone = train(fresh())
    found = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for prefetch in (False, True):
            found[strategy.name, prefetch] = train(wrapped(fresh(), strategy, forward_prefetch=prefetch))
    if rank == 0:
        print(f"one process: {alone}")
        for (name, prefetch), seen in found.items():
            print(f"{name}, forward_prefetch={prefetch}: {seen}")
    wrong = found.pop(("NO_SHARD", True))
    assert all(seen == alone for seen in found.values())
    assert wrong[:3] == alone[:3]
    assert wrong[3] != alone[3], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
