"""Local SGD: each rank steps its own gradient, and weights are averaged every so many steps."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--period", type=int, default=1)
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--mistake", default="")
options = parser.parse_args()

torch.set_default_dtype(torch.float64)
dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
more = {"momentum": 0.9} if options.optimizer == "SGD" else {}
optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=0.05, **more)
data = TensorDataset(torch.randn(60, 6), torch.randn(60, 1))
sampler = DistributedSampler(data, shuffle=False)
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    for parameter in model.parameters() if (step + 1) % options.period == 0 else ():
        if options.mistake == "broadcast":
            dist.broadcast(parameter.data, 0)
        else:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
dist.destroy_process_group()
