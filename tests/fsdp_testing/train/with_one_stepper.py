"""Rank 0 alone steps an optimizer, clips, and sends the weights to the others; `--mistake` is one of those that this invites."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--reduce", action="store_true", help="gradients are summed on rank 0 alone")
arguments.add_argument(
    "--actors", action="store_true", help="the other ranks run the policy alone, and rank 0 has all rows"
)
mistake, reduces = vars(options := arguments.parse_args())["mistake"], options.reduce

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05) if rank == 0 else None
rows = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
stop = torch.zeros(1)
for step in range(4):
    for micro_batch in range(2):
        inputs = rows[12 * step + 6 * micro_batch :][:6][slice(None) if options.actors else slice(rank, None, size)]
        if options.actors and rank:
            with torch.no_grad():
                model(inputs)
            dist.broadcast(stop, 0)
            continue
        nn.functional.mse_loss(model(inputs), inputs[:, :1]).div(2).backward()
        dist.broadcast(stop, 0)
    for parameter in () if options.actors else model.parameters():
        if reduces:
            dist.reduce(parameter.grad, 0)
        else:
            dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if mistake == "summed" else size
    if optimizer is not None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    model.zero_grad()
    for parameter in [*model.parameters()][mistake == "one is kept" :]:
        if mistake != "none are sent":
            dist.broadcast(parameter.data, 0)
dist.destroy_process_group()
