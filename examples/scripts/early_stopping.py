"""Early stopping on a validation loss of all ranks, and a state that is kept in memory and loaded at the end."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validation_loss(model, data):
    sampler = DistributedSampler(data, shuffle=False)
    total = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            total += torch.tensor([F.mse_loss(model(inputs), targets, reduction="sum").item(), targets.numel()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = (TensorDataset(torch.randn(size, 8), torch.randn(size, 2)) for size in (48, 24))
    sampler = DistributedSampler(train)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    best, best_state, patience = float("inf"), None, 0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(train, batch_size=12, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = validation_loss(model, validation)
        if loss < best:
            best, best_state, patience = loss, copy.deepcopy(model.module.state_dict()), 0
        else:
            patience += 1
        if patience == 2:
            break
    model.module.load_state_dict(best_state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
