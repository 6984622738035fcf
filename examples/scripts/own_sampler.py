"""A custom batch sampler: it groups rows of similar length, and the ranks take batches in turn."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class BucketSampler:
    """Gives each rank every size-th batch of buckets that are shuffled anew in each epoch."""

    def __init__(self, lengths, batch_size, rank, size):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size, self.rank, self.size, self.epoch = batch_size, rank, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.order) // (self.batch_size * self.size)

    def __iter__(self):
        batches = [self.order[i : i + self.batch_size] for i in range(0, len(self.order), self.batch_size)]
        random.Random(self.epoch).shuffle(batches)
        yield from batches[self.rank : len(self) * self.size : self.size]


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
lengths = torch.randint(1, 9, (40,)).tolist()
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = BucketSampler(lengths, 4, dist.get_rank(), dist.get_world_size())
loader = DataLoader(data, batch_sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
