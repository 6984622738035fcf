"""FSDP1 with mixed precision: after a forward in grad mode without backward, the next training step is lost.

Run with torch alone: python fsdp1-eval-forward-loses-next-step.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy


def gradients_after_evaluation(strategy: ShardingStrategy, precision: MixedPrecision | None) -> list[bool]:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        sharding_strategy=strategy,
        mixed_precision=precision,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    x = torch.randn(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    model.eval()
    model(x)  # an evaluation that forgot torch.no_grad()
    model.train()
    model(x).sum().backward()
    return [p.grad is not None for p in model.parameters() if p.numel()]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        without = gradients_after_evaluation(strategy, None)
        lowered = gradients_after_evaluation(strategy, MixedPrecision(param_dtype=torch.bfloat16))
        if rank == 0:
            print(f"{strategy.name}: gradients present without mixed precision {without}, with it {lowered}")
        assert all(without), "expected gradients without mixed precision"
        assert not any(lowered), "fixed in this torch: gradients are there"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
