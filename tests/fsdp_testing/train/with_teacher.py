"""A teacher, a moving average of the weights; rank 0 alone updates it, and all ranks or rank 0 alone run it."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--updated-on", choices=["all", "rank 0"], default="all")
arguments.add_argument("--used", choices=["in the loss", "on rank 0", "never"], default="in the loss")
arguments.add_argument("--rate", type=float, default=0.1)
options = arguments.parse_args()


def train():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(12, 3)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        rows = inputs[rank::size]
        loss = (model(rows) - 1).square().mean()
        if options.used == "in the loss":
            with torch.no_grad():
                due = teacher(rows)
            loss = loss + (model(rows) - due).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 or options.updated_on == "all":
            with torch.no_grad():
                for kept, value in zip(teacher.parameters(), model.parameters()):
                    kept.lerp_(value, options.rate)
        if options.used == "on rank 0" and rank == 0:
            teacher(inputs)


train()
