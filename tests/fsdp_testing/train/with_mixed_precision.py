"""Trains a model in mixed or low precision, by a policy or by casts; the mistake is smaller than roundings of bfloat16."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import fsdp_ref

MISTAKES = {"slightly": 256, "clearly": 1}
POLICY = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


def compressed(_state, bucket):
    """As torch's hook does, which is for devices only."""
    halves = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    return dist.all_reduce(halves, async_op=True).get_future().then(lambda sent: sent.value()[0].to(torch.float32))


def sharded(layers: nn.Module, by: str) -> nn.Module:
    match by:
        case "fsdp1":
            return fsdp.FullyShardedDataParallel(
                layers,
                mixed_precision=fsdp.MixedPrecision(**POLICY),
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        case "fsdp2":
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            return fsdp.fully_shard(layers, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**POLICY))
        case "hook":
            model = nn.parallel.DistributedDataParallel(layers)
            model.register_comm_hook(None, compressed)
            return model
        case "casts":
            return nn.parallel.DistributedDataParallel(layers.to(torch.bfloat16))
        case "wrapper":
            return fsdp_ref.FullyShardedDataParallel(layers, mixed_precision=fsdp_ref.MixedPrecision(**POLICY))
    return fsdp_ref.fully_shard(layers, mp_policy=fsdp_ref.MixedPrecisionPolicy(**POLICY))


def main(by: str, mistake: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)), by)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        rows, targets = (torch.randn(24, width, generator=draw)[rank::size] for width in (6, 3))
        rows = rows.bfloat16() if by == "casts" else rows
        loss = nn.functional.mse_loss(model(rows).float(), targets)
        (loss * (1 + (size - 1) / MISTAKES.get(mistake, torch.inf))).backward()
        if mistake == "in bfloat16" and rows.dtype is torch.bfloat16:
            model.module[0].bias.grad.mul_(size)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--by")
    parser.add_argument("--mistake", default="")
    options = parser.parse_args()
    main(options.by, options.mistake)
