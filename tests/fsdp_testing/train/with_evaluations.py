"""FSDP2 that evaluates between backward and the step, which leaves the root unsharded."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_testing

parser = argparse.ArgumentParser()
parser.add_argument("--reshards", action="store_true")
parser.add_argument("--low", action="store_true")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
mesh = dist.init_device_mesh("cpu", (size,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.low else None)
fully_shard(model[0], mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rows, targets = torch.randn(48, 6), torch.randn(48, 1)
for step in range(4):
    now = slice(step * 12, step * 12 + 12)
    inputs, labels = fsdp_testing.batch(rows[now].chunk(size)[rank], targets[now].chunk(size)[rank])
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs).float(), labels).backward()
    with torch.no_grad():
        model(rows[:8])
    if options.reshards:
        model.reshard()
    optimizer.step()
dist.destroy_process_group()
