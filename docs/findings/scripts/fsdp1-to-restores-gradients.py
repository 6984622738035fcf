"""FSDP1, use_orig_params=True: module.to(...) after zero_grad brings the cleared gradients back.

Run with torch alone: python fsdp1-to-restores-gradients.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def gradients(strategy: ShardingStrategy) -> tuple[list[bool], list[bool]]:
    """Whether parameters have a gradient after zero_grad, and after a `.to` the device where they are."""
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    cleared = [parameter.grad is not None for parameter in model.parameters()]
    model.to("cpu")
    return cleared, [parameter.grad is not None for parameter in model.parameters()]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        cleared, moved = gradients(strategy)
        if rank == 0:
            print(f"{strategy.name}: gradients after zero_grad {cleared}, after .to('cpu') {moved}")
        assert not any(cleared)
        assert any(moved), "fixed in this torch"
    cleared, moved = gradients(ShardingStrategy.NO_SHARD)
    assert not any(cleared + moved)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
