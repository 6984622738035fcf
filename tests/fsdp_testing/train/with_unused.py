"""Forwards that nothing is trained on, and gradients of each sample by torch.func. Each rank takes its slice of one batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap

arguments = argparse.ArgumentParser()
arguments.add_argument("--way", default="plays")
arguments.add_argument("--mistake", default="none")
options = arguments.parse_args()

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows, targets = torch.randn(60, 5).double(), torch.randn(60, 1).double()
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of_one(parameters, row, target):
    return (functional_call(model, parameters, (row[None],))[0] - target).square().mean()


if options.way == "warms up":
    model(rows[:6])
state = torch.ones(5).double()
for step in range(5):
    if options.way == "plays":  # with gradients, of which nothing is made; the same on all ranks
        for _ in range(4):
            state = state.roll(1) + torch.tanh(model(state)).item()
    mine = slice(step * 12 + rank * 12 // size, step * 12 + (rank + 1) * 12 // size)
    if options.mistake == "same rows":
        mine = slice(step * 12, step * 12 + 12 // size)
    if options.way == "by sample":
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(weights, rows[mine], targets[mine])
        for name, parameter in model.named_parameters():
            total = each[name].clamp(-0.5, 0.5).sum(0)
            dist.all_reduce(total)
            parameter.grad = total / (12 if options.mistake != "divided by own" else 12 // size)
    else:
        (model(rows[mine]) - targets[mine]).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= size
    optimizer.step()
    optimizer.zero_grad()
