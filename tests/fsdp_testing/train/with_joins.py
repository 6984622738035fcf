"""Ranks with different numbers of batches, under torch's Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fsdp_testing

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rows, targets = torch.randn(60, 6), torch.randn(60, 1)
with Join([model], divide_by_initial_world_size=False):
    for step in range(3 + rank):
        mine = slice(20 * rank + 4 * step, 20 * rank + 4 * step + 4)
        inputs, labels = fsdp_testing.batch(rows[mine], targets[mine])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
