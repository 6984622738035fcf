"""FSDP1 `NO_SHARD`: a unit that a backward prepares and then gives no gradient loses its parameters.

Run with torch alone: python fsdp1-no-shard-unit-without-gradient.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

COMMON = {"use_orig_params": True, "device_id": torch.device("cpu")}


class Model(nn.Module):
    """`side` takes part in the forward, but not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side(x)
        return self.last(x)


def trained(strategy: ShardingStrategy, prefetch: BackwardPrefetch | None) -> FSDP:
    torch.manual_seed(0)
    options = {"sharding_strategy": strategy, "backward_prefetch": prefetch, **COMMON}
    model = Model()
    model.side = FSDP(model.side, **options)
    model = FSDP(model, **options)
    model(torch.ones(2, 2)).sum().backward()
    return model


def shown(strategy: ShardingStrategy, prefetch: BackwardPrefetch | None) -> tuple[int, int, bool]:
    """Number of parameters, entries of the state dict, and whether an edit of the full parameters is kept."""
    model = trained(strategy, prefetch)
    counts, unit = (len(list(model.parameters())), len(model.state_dict())), model.module.side
    with FSDP.summon_full_params(unit), torch.no_grad():
        before = unit.module.weight.detach().clone()
        for parameter in unit.parameters():
            parameter.mul_(-1)
    with FSDP.summon_full_params(unit):
        kept = torch.equal(unit.module.weight, -before)
    return *counts, kept


def left_of_frozen(strategy: ShardingStrategy) -> int:
    """Number of parameters after a backward, of 4; the root's own layer is in the loss, and frozen."""
    options, frozen = {"sharding_strategy": strategy, **COMMON}, nn.Linear(2, 2).requires_grad_(False)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), **options), frozen), **options)
    model(torch.ones(2, 2)).sum().backward()
    return len(list(model.parameters()))


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        for prefetch in (None, BackwardPrefetch.BACKWARD_PRE):
            parameters, entries, kept = shown(strategy, prefetch)
            if rank == 0:
                print(f"{strategy.name}, {prefetch}: {parameters} parameters, {entries} saved, edit kept: {kept}")
            broken = strategy is ShardingStrategy.NO_SHARD and prefetch is not None
            expected = (2, 2, False) if broken else (4, 4, True)
            assert (parameters, entries, kept) == expected, f"expected {expected} of torch 2.13"
    left = [left_of_frozen(strategy) for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)]
    assert left == [4, 2], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
