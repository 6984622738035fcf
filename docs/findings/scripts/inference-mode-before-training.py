"""FSDP1 and FSDP2: a first forward under torch.inference_mode makes the model untrainable.

Run with torch alone: python inference-mode-before-training.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def fsdp1(module: nn.Module, *, reshard: bool) -> nn.Module:
    strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(module: nn.Module, *, reshard: bool) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    return fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def trains_after(wrap, context, *, reshard: bool) -> str:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), reshard=reshard)
    x = torch.randn(2, 4)
    with context():
        model(x)
    try:
        model(x).sum().backward()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:70]}"
    return "trains"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for name, wrap in (("FSDP1", fsdp1), ("FSDP2", fsdp2)):
        for reshard in (True, False):
            assert trains_after(wrap, torch.no_grad, reshard=reshard) == "trains"
            told = trains_after(wrap, torch.inference_mode, reshard=reshard)
            if rank == 0:
                print(f"{name} reshard={reshard} after inference_mode: {told}")
            assert told != "trains", f"fixed in this torch: {name} reshard={reshard}"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
