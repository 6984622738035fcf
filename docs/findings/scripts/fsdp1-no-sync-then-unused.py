"""FSDP1: gradients that no_sync collected for a unit are not reduced if the next synchronised backward does not use it.

NO_SHARD leaves them different on every rank, silently; the others raise an AssertionError, but not after a micro-batch that
was synchronised: then each rank keeps its own gradient (original parameters), or it is gone (flat ones).
Run with torch alone: python fsdp1-no-sync-then-unused.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy


class Branched(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.trunk = wrap(nn.Linear(4, 4))
        self.branch = wrap(nn.Linear(4, 4))

    def forward(self, x, use_branch):
        x = self.trunk(x)
        return self.branch(x) if use_branch else x


def wrapped(**options) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FullyShardedDataParallel(Branched(lambda module: FullyShardedDataParallel(module, **options)), **options)


def run(strategy: ShardingStrategy, rank: int) -> str:
    model = wrapped(sharding_strategy=strategy)
    x = torch.full((2, 4), float(rank + 1))
    with model.no_sync():
        model(x, use_branch=True).sum().backward()
    try:
        model(x, use_branch=False).sum().backward()
    except AssertionError as error:
        return f"AssertionError: {error}"
    grad = model.branch.weight.grad.detach().flatten()
    on_ranks = [torch.empty_like(grad) for _ in range(2)]
    dist.all_gather(on_ranks, grad)
    return f"gradients of the branch {'agree' if torch.equal(*on_ranks) else 'differ between ranks'}"


def three_micro_batches(rank: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of the branch after a backward that used it, and after two more: used in no_sync, not used."""
    model = wrapped(**options)
    x = torch.full((2, 4), float(rank + 1))
    model(x, use_branch=True).float().sum().backward()
    branch = next(model.branch.parameters())
    first = branch.grad.clone()
    with model.no_sync():
        model(x, use_branch=True).float().sum().backward()
    model(x, use_branch=False).float().sum().backward()
    return first, branch.grad


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        print(f"rank {rank}, {strategy.name}: {(told := run(strategy, rank))}")
        expected = "differ between ranks" if strategy is ShardingStrategy.NO_SHARD else "AssertionError"
        assert expected in told, f"fixed in this torch: {strategy.name}"
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mixed_precision": low}):
        # A gradient of the whole weight, where this rank has one half of it.
        assert three_micro_batches(rank, **options)[1].numel() == 16, f"fixed in this torch: {options}"
    first, last = three_micro_batches(rank, use_orig_params=False)
    assert torch.equal(first, last), "fixed in this torch: flat parameters"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
