"""Who steps what: copies in float32, several optimizers, an optimizer that only has its state made. One mistake at a time."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--kind", choices=["masters", "flat masters", "two", "players", "state first", "meta", "loaded"])
arguments.add_argument("--mistake", default="none")
options = arguments.parse_args()
kind, mistake = options.kind, options.mistake
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
factor = size if mistake == "scaled rate" else 1


def batches(steps=3, dtype=torch.float32):
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randn(12, 5, generator=draw), torch.randn(12, 1, generator=draw)
        yield (part[rank::size].to(dtype) for part in rows)


def made(width=7):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


def error(model, inputs, targets):
    return (model(inputs) - targets).float().square().mean()


def train_with_copies():
    model = DistributedDataParallel(made().bfloat16())
    parameters = list(model.parameters())
    copies = [p.detach().float() for p in parameters]
    if kind == "flat masters":
        copies = [torch.cat([copy.reshape(-1) for copy in copies])]
    optimizer = torch.optim.SGD(copies, lr=0.5 * factor)
    for inputs, targets in batches(dtype=torch.bfloat16):
        error(model, inputs, targets).backward()
        gradients = [p.grad.float() for p in parameters]
        if kind == "flat masters":
            gradients = [torch.cat([gradient.reshape(-1) for gradient in gradients])]
        for copy, gradient in zip(copies, gradients):
            copy.grad = gradient
        if mistake != "gradients kept":
            model.zero_grad()
        optimizer.step()
        model.zero_grad()
        if mistake == "not copied back" and rank == 1:
            continue
        flat = copies[0].split([p.numel() for p in parameters]) if kind == "flat masters" else copies
        with torch.no_grad():
            for p, copy in zip(parameters, flat):
                p.copy_(copy.view_as(p))


def train_with_two_optimizers():
    model = DistributedDataParallel(made())
    first, second = model.module[0], model.module[2]
    optimizers = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.01 * factor)
    for inputs, targets in batches():
        error(model, inputs, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_two_players():
    maker, judge = DistributedDataParallel(made()), DistributedDataParallel(nn.Linear(1, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.02 * factor)
    for inputs, targets in batches():
        fakes = maker(inputs)
        of_judge.zero_grad()
        (judge(fakes.detach()).mean() - judge(targets).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judge(fakes)).mean().backward()
        of_maker.step()


def train_shards():
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = made(8)
    if kind == "loaded":
        pretrained = {name: value + 0.5 for name, value in model.state_dict().items()}
        if rank == 0 or mistake != "loaded on one":
            model.load_state_dict(pretrained)
    fully_shard(model)
    if kind == "meta":
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * factor)
    if kind == "state first":
        get_state_dict(model, optimizer)
    for inputs, targets in batches():
        error(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


if "masters" in kind:
    train_with_copies()
elif kind == "two":
    train_with_two_optimizers()
elif kind == "players":
    train_two_players()
else:
    train_shards()
dist.destroy_process_group()
