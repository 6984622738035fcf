"""FSDP2: a backward pre-hook on a unit finds its weight sharded.

Run with torch alone: python fsdp2-backward-pre-hook.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer, kinds = nn.Linear(2, 4), []
    layer.register_full_backward_pre_hook(lambda module, grads: kinds.append(("pre-hook", type(module.weight))))
    layer.register_forward_hook(lambda module, args, output: kinds.append(("forward hook", type(module.weight))))
    model = fully_shard(nn.Sequential(fully_shard(layer), nn.Linear(4, 2)))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        print([(name, kind.__name__) for name, kind in kinds])
    assert not issubclass(dict(kinds)["forward hook"], DTensor)
    assert issubclass(dict(kinds)["pre-hook"], DTensor), "the pre-hook finds the whole weight in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(main, (directory,), nprocs=2, start_method="fork")
