"""Two players by DDP: the second is given mixtures of data and of what the first makes, so its rows depend on weights."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6))
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)))
makers, judges = (torch.optim.SGD(player.parameters(), lr=0.1) for player in (maker, judge))
for (rows,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    made, share = maker(rows[:, :4]).detach(), rows[:, :1].sigmoid()
    mixed = (share * rows + (1 - share) * made).requires_grad_(True)
    slope = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)[0]
    (judge(made).mean() - judge(rows).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
    judges.step()
    judges.zero_grad()
    loss = -judge(maker(rows[:, :4])).mean()
    (loss * dist.get_world_size() if "summed" in sys.argv else loss).backward()
    makers.step()
    makers.zero_grad()
    judges.zero_grad()
dist.destroy_process_group()
