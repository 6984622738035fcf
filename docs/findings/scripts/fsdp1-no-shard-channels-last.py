"""FSDP1 NO_SHARD, use_orig_params=True: the gradient of a channels-last weight has its elements at the wrong places.

Run with torch alone: python fsdp1-no-shard-channels-last.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def weight_gradient(memory_format: torch.memory_format, wrap=lambda module: module) -> torch.Tensor:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=memory_format)
    model = wrap(conv)
    x = torch.arange(18.0).reshape(1, 2, 3, 3)
    model(x).sum().backward()
    return next(model.parameters()).grad


def no_shard(module: nn.Module) -> FullyShardedDataParallel:
    strategy = ShardingStrategy.NO_SHARD
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        plain = weight_gradient(memory_format)
        sharded = weight_gradient(memory_format, no_shard)
        apart = (plain - sharded).abs().max().item()
        if rank == 0:
            print(f"{memory_format}: FSDP and the plain module are {apart} apart")
        assert (apart > 0) == (memory_format is torch.channels_last), "fixed in this torch"
        assert torch.equal(plain.flatten().sort().values, sharded.flatten().sort().values)  # the numbers are all there
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
