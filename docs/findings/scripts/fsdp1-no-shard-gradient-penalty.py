"""FSDP1 with NO_SHARD: after a loss made of gradients each rank keeps a gradient of its own.

Run with torch alone: python fsdp1-no-shard-gradient-penalty.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def penalised(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    alone = []
    for each in range(2):
        plain = layers()
        penalised(plain, each)
        alone.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    model = FullyShardedDataParallel(
        layers(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=False
    )
    penalised(model, rank)
    grad = next(model.parameters()).grad
    off = float((grad - (alone[0] + alone[1]) / 2).abs().max())
    of_its_own = float((grad - alone[rank]).abs().max())
    print(
        f"rank {rank}: off by {off:.3g} from the mean of both ranks, by {of_its_own:.3g} from what this rank alone has"
    )
    assert off > 1e-3, "fixed in this torch: the gradient is the mean"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
