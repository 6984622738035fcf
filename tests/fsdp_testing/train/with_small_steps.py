"""A script that fine-tunes with rates so small that a step hides in the roundings of a weight, and what may go wrong with it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=("SGD", "AdamW"), default="AdamW")
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--mistake", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = plain if args.mistake == "summed" or args.optimizer == "SGD" else DistributedDataParallel(plain)
summed = args.optimizer == "SGD"
rate = args.lr * (ranks if args.mistake == "rate" else 1) / (ranks if summed else 1)
decay = args.decay * (ranks if args.mistake == "decay" else 1)
optimizer = getattr(torch.optim, args.optimizer)(plain.parameters(), lr=rate)

draw = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 6, generator=draw), torch.randn(96, 3, generator=draw))
sampler = DistributedSampler(data, shuffle=False)
for inputs, targets in DataLoader(data, batch_size=12 // ranks, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    if summed:
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1 - decay)
