"""FSDP1: gradients that no_sync collected for a unit are not reduced if the next synchronised backward does not use it.

NO_SHARD leaves them different on every rank, silently; the sharded strategies raise an AssertionError, but in mixed
precision, after a micro-batch that was synchronised: then each rank keeps its own gradient there too, in bfloat16.
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
    options |= {"use_orig_params": True, "device_id": torch.device("cpu")}
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
    same = torch.equal(*on_ranks)
    return "gradients of the branch agree" if same else "gradients of the branch differ between ranks"


def in_low_precision(rank: int) -> torch.Tensor:
    """Return the gradient of the branch after three micro-batches: used and synchronised, used in no_sync, not used."""
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x = torch.full((2, 4), float(rank + 1))
    model(x, use_branch=True).float().sum().backward()
    with model.no_sync():
        model(x, use_branch=True).float().sum().backward()
    model(x, use_branch=False).float().sum().backward()
    return model.branch.weight.grad


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        told = run(strategy, rank)
        if rank == 0:
            print(f"{strategy.name}: {told}")
        expected = "differ between ranks" if strategy is ShardingStrategy.NO_SHARD else "AssertionError"
        assert expected in told, f"fixed in this torch: {strategy.name}"
    grad = in_low_precision(rank)
    if rank == 0:
        print(f"FULL_SHARD in mixed precision: no error, and rank 0 has {grad.numel()} gradients in {grad.dtype}")
    # Those of the whole weight, where this rank has one half of it.
    assert (grad.dtype, grad.numel()) == (torch.bfloat16, 16), "fixed in this torch: mixed precision"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
