"""Sharpness-aware minimisation: weights go up along the gradient of all ranks, and the second gradient is stepped."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RHO = 0.05


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            F.cross_entropy(model(inputs), labels).backward()
            parameters = list(model.parameters())
            with torch.no_grad():
                norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
                steps = [parameter.grad * (RHO / (norm + 1e-12)) for parameter in parameters]
                for parameter, step in zip(parameters, steps):
                    parameter.add_(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            with torch.no_grad():
                for parameter, step in zip(parameters, steps):
                    parameter.sub_(step)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
