"""Mixup: each rank draws the share and the partners for the rows of its own batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            share, partner = torch.rand(()), torch.randperm(len(inputs))
            logits = model(share * inputs + (1 - share) * inputs[partner])
            loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[partner])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
