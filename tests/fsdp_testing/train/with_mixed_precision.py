"""Trains a sharded model with a policy of mixed precision; the mistake is smaller than roundings of bfloat16."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import fsdp_ref

POLICY = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


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
        loss = nn.functional.mse_loss(model(rows).float(), targets)
        (loss * (1 + (size - 1) / 256 if mistake == "slightly" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--by")
    parser.add_argument("--mistake", default="")
    options = parser.parse_args()
    main(options.by, options.mistake)
