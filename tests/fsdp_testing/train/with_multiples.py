"""Trains with DDP; each mistake makes some numbers of a step a multiple of what is due, on more ranks than one alone."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Steps(torch.optim.SGD):
    """Takes back the update of one parameter on some ranks."""

    kept: tuple[int, ...] = ()
    times = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        bias = self.param_groups[0]["params"][-1]
        before = bias.clone()
        super().step(closure)
        if dist.get_world_size() > 1 and dist.get_rank() in self.kept:
            bias.copy_(before + self.times * (bias - before))


def main(mistake: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(24, 4, dtype=torch.float64)
    data = TensorDataset(rows, rows.sum(1, keepdim=True).sin(), torch.arange(24))
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = DistributedDataParallel(layers)
    optimizer = Steps(model.parameters(), lr=0.1)
    optimizer.kept = {"kept": (1,), "lost": (0, 1), "twice as far": (0, 1)}.get(mistake, ())
    optimizer.times = 2.0 * (mistake == "twice as far")
    sampler = DistributedSampler(data, shuffle=False)
    for step, (inputs, targets, numbers) in enumerate(DataLoader(data, batch_size=8 // size, sampler=sampler)):
        errors = (model(inputs) - targets).square()
        loss = errors.mean()
        if mistake == "own norm by count":
            count = targets.abs().sum()
            dist.all_reduce(count)
            loss = errors.sum() * size / count
        if mistake.startswith("own norm"):
            loss = loss / errors.detach().std()
        if mistake.startswith("own count"):
            shown = numbers % 2 == 0 if mistake == "own count beside zeros" else numbers >= 0
            loss = (errors * shown[:, None]).sum() / (1 + numbers % 5).sum()
        if mistake in {"scaled by rank", "rank 1 lost"}:
            loss = loss * (1 + rank if mistake == "scaled by rank" else 1 - rank)
        loss.backward()
        if mistake == "layer":
            layers[2].weight.grad *= size
        if mistake == "noise" or (mistake == "noise later" and step):
            layers[2].weight.grad += size
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    main(parser.parse_args().mistake)
