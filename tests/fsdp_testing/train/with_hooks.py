"""Two parameters have hooks that train some rows alone: --kind says which, --way what wraps the model."""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--way", default="ddp")
arguments.add_argument("--kind", default="gradient")
options = arguments.parse_args()


def masked(gradient):
    return gradient * 0.5


def mask(factor, parameter):
    parameter.grad = parameter.grad * factor


def register(parameter):
    if options.kind == "gradient":
        parameter.register_hook(masked)
    else:
        parameter.register_post_accumulate_grad_hook(partial(mask, 0.5))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
if options.kind != "after":
    for layer in (0, 2):
        register(model[layer].weight)
if options.way == "ddp":
    model = DistributedDataParallel(model)
elif options.way == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
else:
    fully_shard(model)
if options.kind == "after":
    for layer in (0, 2):
        register(model[layer].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(2):
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))[rank::size]
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
