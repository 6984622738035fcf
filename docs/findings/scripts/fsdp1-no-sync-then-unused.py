"""FSDP1: gradients that no_sync collected for a unit are not reduced if the next synchronised backward does not use it.

NO_SHARD leaves them different on every rank, without a word; the sharded strategies raise an AssertionError.
Run with torch alone: python fsdp1-no-sync-then-unused.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Branched(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.trunk = wrap(nn.Linear(4, 4))
        self.branch = wrap(nn.Linear(4, 4))

    def forward(self, x, use_branch):
        x = self.trunk(x)
        return self.branch(x) if use_branch else x


def run(strategy: ShardingStrategy, rank: int) -> str:
    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
        )

    torch.manual_seed(0)
    model = wrap(Branched(wrap))
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


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        told = run(strategy, rank)
        if rank == 0:
            print(f"{strategy.name}: {told}")
        expected = "differ between ranks" if strategy is ShardingStrategy.NO_SHARD else "AssertionError"
        assert expected in told, f"fixed in this torch: {strategy.name}"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
