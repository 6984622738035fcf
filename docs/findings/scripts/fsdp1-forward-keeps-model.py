"""FSDP1: a forward in training without a backward keeps the model in memory. Run: python fsdp1-forward-keeps-model.py"""

import gc
import tempfile
import weakref

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def stays(backward: bool, no_grad: bool = False, flat: bool = False) -> bool:
    """Whether a model that nobody refers to any more is still there; `flat`: whether its flat parameter is, in NO_SHARD."""
    strategy = ShardingStrategy.NO_SHARD if flat else ShardingStrategy.FULL_SHARD
    model = FullyShardedDataParallel(
        nn.Linear(4, 1), None, strategy, use_orig_params=True, device_id=torch.device("cpu")
    )
    with torch.set_grad_enabled(not no_grad):
        loss = model(torch.ones(1, 4)).sum()
    if backward:
        loss.backward()
    kept = weakref.ref(model._handle.flat_param if flat else model)
    del model, loss
    for _ in range(3):
        gc.collect()
    return kept() is not None


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {"with backward": stays(True), "without": stays(False), "without, under no_grad": stays(False, no_grad=True)}
    told["NO_SHARD's flat parameter with backward"] = stays(True, flat=True)
    if rank == 0:
        print(", ".join(f"{how}: {'stays' if kept else 'gone'}" for how, kept in told.items()))
    assert list(told.values()) == [False, True, False, True], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
