"""Where a script keeps a moving average, and how it ends: the decay is wrong on several ranks with --mistake."""

import argparse
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--where", choices=["function", "exit", "object", "far", "nowhere"])
arguments.add_argument("--mistake", action="store_true")
options = arguments.parse_args()


class Average:
    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
        if options.where == "far":
            self.shadow = {name: torch.full_like(value, 9.0) for name, value in self.shadow.items()}
        if options.where == "nowhere":
            self.shadow = torch.cat([value.flatten() for value in self.shadow.values()])

    def update(self, model, rate):
        now = model.state_dict()
        if options.where == "nowhere":
            self.shadow.lerp_(torch.cat([value.flatten() for value in now.values()]), rate)
        else:
            self.shadow = {name: value.lerp(now[name], rate) for name, value in self.shadow.items()}


class Trainer:
    def __init__(self, model):
        self.hooks = [Average(model)]

    def end_step(self, model, rate):
        for hook in self.hooks:
            hook.update(model, rate)


def train():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1).double(), torch.randn(12, 3).double()
    rate = 0.1 * (size if options.mistake else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.where in ("function", "exit"):
        average = copy.deepcopy(model)
    else:
        ema = Trainer(model)
    for _ in range(2):
        (model(inputs[rank::size]) - 1).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        if options.where in ("function", "exit"):
            with torch.no_grad():
                for kept, value in zip(average.parameters(), model.parameters()):
                    kept.lerp_(value, rate)
        else:
            ema.end_step(model, rate)


if options.where == "exit":
    sys.exit(train())
train()
