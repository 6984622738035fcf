"""A script that skips batches whose loss is not finite: each rank its own, or all together."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdp_testing


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--together", action="store_true")
    asked.add_argument("--marked", action="store_true")
    options = asked.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(48, 3)
    x[1] = float("nan")
    sampler = DistributedSampler(x, shuffle=False)
    for (rows,) in DataLoader(TensorDataset(x), 12 // dist.get_world_size(), sampler=sampler):
        given = fsdp_testing.batch(rows) if options.marked else rows
        loss = model(given).square().mean()
        bad = (~loss.detach().isfinite()).float()
        if options.together:
            dist.all_reduce(bad)
        if bad:
            continue
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    dist.destroy_process_group()


main()
