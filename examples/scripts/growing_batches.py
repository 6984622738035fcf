"""Batches that grow from epoch to epoch, with a learning rate that grows with the root of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 2))
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch, batch_size in enumerate((4, 6, 12)):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (batch_size / 4) ** 0.5
        for inputs, targets in DataLoader(data, batch_size=batch_size, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
