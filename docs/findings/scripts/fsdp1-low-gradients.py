"""With `keep_low_precision_grads` FSDP1's gradients have the dtype of computation, not that in which they were reduced.

Run with torch alone: python fsdp1-low-gradients.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

HALF, FULL = torch.bfloat16, torch.float32


def dtype_of_gradients(compute: torch.dtype | None, reduce: torch.dtype, strategy: ShardingStrategy) -> torch.dtype:
    precision = MixedPrecision(param_dtype=compute, reduce_dtype=reduce, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        sharding_strategy=strategy,
        mixed_precision=precision,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model(torch.ones(1, 4)).sum().backward()
    return next(parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None)


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sharded, whole = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
    seen = {
        "computed and reduced in 16 bits": dtype_of_gradients(HALF, HALF, sharded),
        "reduced in 16 bits": dtype_of_gradients(None, HALF, sharded),
        "reduced in 16 bits, not sharded": dtype_of_gradients(None, HALF, whole),
        "computed in 16 bits, reduced in 32": dtype_of_gradients(HALF, FULL, sharded),
    }
    if rank == 0:
        for how, dtype in seen.items():
            print(f"{how}: {dtype}")
    # The documentation promises the dtype of the reduction: 16, 16, 16 and 32 bits.
    assert list(seen.values()) == [HALF, FULL, HALF, HALF]
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=2)
