"""Conventions by which N ranks are not one process: of batch norms, of a router's balance. One mistake at a time."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--kind", choices=["batch norm", "balance", "balance kept", "message", "dropout"])
arguments.add_argument("--mistake", default="none")
options = arguments.parse_args()
kind, mistake = options.kind, options.mistake
if kind == "message":
    sys.exit("no data here: make them first")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Routed(nn.Module):
    """Two experts; what it returns beside the outputs, or keeps, is smallest where both have as many rows."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(5, 2), nn.ModuleList(nn.Linear(5, 1) for _ in range(2))
        self.balance = None

    def forward(self, inputs):
        share = self.router(inputs).softmax(-1)
        self.balance = share.mean(0).square().sum()
        outputs = sum(share[:, at : at + 1] * expert(inputs) for at, expert in enumerate(self.experts))
        return outputs if kind == "balance kept" else (outputs, self.balance)


if kind == "batch norm":
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
elif kind == "dropout":
    plain = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 1))
else:
    plain = Routed()
plain = plain.double()
model = DistributedDataParallel(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    draw = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(12, count, generator=draw).double()[rank::size] for count in (5, 1))
    outputs, balance = model(inputs), 0.0
    if "balance" in kind:
        outputs, balance = (outputs, plain.balance) if kind == "balance kept" else outputs
    loss = (outputs - targets).square().mean() + balance
    loss.backward()
    if mistake == "summed":
        next(iter(plain.parameters())).grad.mul_(size)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
