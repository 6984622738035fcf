"""Sharded models; each rank takes its slice of one global batch. One classic mistake at a time."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fsdp_ref

arguments = argparse.ArgumentParser()
arguments.add_argument("--shard", choices=["fsdp1", "flat", "fsdp2", "reference"])
arguments.add_argument("--mistake", default="none")
options = arguments.parse_args()

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
if options.mistake == "optimizer first":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if options.shard == "fsdp2":
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
elif options.shard == "reference":
    model = fsdp_ref.FullyShardedDataParallel(model)
else:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=options.shard == "fsdp1")
if options.mistake != "optimizer first":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}
for step in range(3):
    draw = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(12, 5, generator=draw).double(), torch.randn(12, 2, generator=draw).double()
    for part in range(2):
        last = part == (2 if options.mistake == "boundary" else 1)
        if options.shard == "fsdp2":
            model.set_requires_gradient_sync(last)
        rows = slice(6 * part + rank, 6 * part + 6, size)
        loss = (model(inputs[rows]) - targets[rows]).square().mean() / 2
        loss.backward()
    if options.mistake == "local norm":
        norm = sum(p.grad.to_local().square().sum() for p in model.parameters()).sqrt()
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 0.1 / norm.item()))
    optimizer.step()
    optimizer.zero_grad()
    if options.shard == "fsdp2" and not (options.mistake == "average" and rank):
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach().to_local(), 0.1)
