"""A table of embeddings whose rows are divided over ranks, before a model that each rank trains on its own rows."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
parser.add_argument("--bare", action="store_true")
options = parser.parse_args()

torch.set_default_dtype(torch.float64)
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = torch.randn(12, 4)
first, last = rank * 12 // size, (rank + 1) * 12 // size


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(whole[first:last].clone())

    def forward(self, indices):
        mine = (indices >= first) & (indices < last)
        return self.weight[(indices - first).clamp(0, last - first - 1)] * mine[..., None]


table = Table()
head = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD([table.weight, *head.parameters()], lr=0.1)
data = TensorDataset(torch.randint(0, 12, (48, 3)), torch.randn(48, 1))
sampler = DistributedSampler(data, shuffle=False)
for indices, targets in DataLoader(data, batch_size=12 // size, sampler=sampler):
    every = [torch.empty_like(indices) for _ in range(size)]
    dist.all_gather(every, indices)
    look = Table.forward if options.bare else Table.__call__
    found = dist.nn.functional.all_reduce(look(table, torch.cat(every)))
    optimizer.zero_grad()
    nn.functional.mse_loss(head(found.chunk(size)[rank].sum(1)), targets).backward()
    if options.mistake != "not divided":
        table.weight.grad /= size
    optimizer.step()
dist.destroy_process_group()
