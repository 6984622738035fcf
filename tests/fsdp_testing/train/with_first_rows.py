"""A model that sets its scale by its first rows, and may do so by those of one rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
mistake = parser.parse_args().mistake


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(width)), False

    def forward(self, rows):
        if not self.ready:
            with torch.no_grad():
                square = rows.square().mean(0)
                if mistake == "rank 0":
                    dist.broadcast(square, 0)
                else:
                    dist.all_reduce(square)
                    square /= dist.get_world_size()
                self.scale.copy_(square.rsqrt())
            self.ready = True
        return rows * self.scale


dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), Scaled(8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
sampler = DistributedSampler(data, shuffle=False)
for inputs, targets in DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
dist.destroy_process_group()
