"""A script that clips and reduces its gradients itself."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="")
mistake = arguments.parse_args().mistake

torch.set_default_dtype(torch.float64)
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows, targets = torch.randn(36, 5), torch.randn(36, 3)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
model.scale = nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    now = slice(step * 12, step * 12 + 12)
    inputs, labels = (values[now].chunk(size)[rank] for values in (rows, targets))
    optimizer.zero_grad()
    (model(inputs) * model.scale - labels).square().mean().backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        if mistake == "clip before":
            gradient.mul_(0.1 / gradient.norm())
        if mistake == "clamp before":
            gradient.clamp_(-0.02, 0.02)
        if mistake == "broadcast" and parameter is model.scale:
            dist.broadcast(gradient, 0)
        else:
            dist.all_reduce(gradient)
            gradient /= size
        if mistake not in ("clip before", "clamp before") and parameter is not model.scale:
            gradient.mul_(0.1 / gradient.norm())
        if mistake == "own noise":
            gradient += 0.01 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
dist.destroy_process_group()
