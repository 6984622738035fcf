"""FSDP1: micro-batches in no_sync add up in param_dtype, whatever reduce_dtype asks for.

With bfloat16 parameters and reduce_dtype float32, 256 equal small gradients beside a large one are lost.
Run with torch alone: python fsdp1-local-sums-in-low-precision.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = FullyShardedDataParallel(
        nn.Linear(2, 2, bias=False),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    with model.no_sync():
        for value in [1.0, *[2.0**-8] * 255]:
            model(torch.full((1, 2), value)).sum().backward()
    model(torch.full((1, 2), 2.0**-8)).sum().backward()
    found = float(next(p.grad for p in model.parameters() if p.grad is not None).flatten()[0])
    if rank == 0:
        print(f"the gradient of 257 micro-batches is {found}, and their sum is {1.0 + 256 * 2.0**-8}")
    assert found < 1.5, "fixed in this torch: local micro-batches add up in reduce_dtype"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
