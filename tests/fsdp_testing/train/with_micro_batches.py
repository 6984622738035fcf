"""DDP on batches that the script itself cuts into micro-batches of a fixed number of rows."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

arguments = argparse.ArgumentParser()
arguments.add_argument("--divide", default="loss", choices=("loss", "length", "gradients", "rows", "budget", "never"))
arguments.add_argument("--batch", type=int, default=4)
arguments.add_argument("--one-backward", action="store_true", help="of the sum of the losses")
arguments.add_argument("--whole", action="store_true", help="no micro-batches; the loss is a sum over rows")
arguments.add_argument("--sums", action="store_true", help="adds up the gradients of the ranks")
arguments.add_argument("--slices", action="store_true", help="takes two micro-batches, however many rows there are")
arguments.add_argument("--mistake", default="none", choices=("none", "world size", "no_sync", "layer"))
options = arguments.parse_args()
PASSES, ROWS = 2, 2

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 5), torch.randn(48, 1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
BUDGET = 12


def by_budget() -> list[list[int]]:
    """Return this rank's batches of at most so much in all; each row counts one to five."""
    batches, left = [[]], BUDGET
    for row in range(len(data)):
        left -= row % 5 + 1
        if left < 0:
            batches.append([])
            left = BUDGET - row % 5 - 1
        batches[-1].append(row)
    size = dist.get_world_size()
    return batches[: len(batches) // size * size][dist.get_rank() :: size]


loader = DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data))
if options.divide == "budget":
    loader = DataLoader(data, batch_sampler=by_budget())
logged = []
factor = dist.get_world_size() if options.mistake == "world size" else 1
for inputs, targets in loader:
    total, kept = 0.0, []
    if options.whole:
        loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
        (
            loss / {"rows": options.batch, "budget": BUDGET, "length": len(inputs)}.get(options.divide, 1) / factor
        ).backward()
    parts = 0 if options.whole else ROWS * PASSES if options.slices else len(inputs)
    for number, start in enumerate(range(0, parts, ROWS), 1):
        rows = slice(start, start + ROWS)
        early = number >= PASSES if options.mistake == "no_sync" else number % PASSES
        with model.no_sync() if early and not options.one_backward else nullcontext():
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            loss = loss / factor
            if options.one_backward:
                kept.append(loss)
            else:
                (loss / {"loss": PASSES, "length": len(inputs) / ROWS}.get(options.divide, 1)).backward()
        total += loss.item()
    if options.one_backward:
        (sum(kept) / PASSES).backward()
    if options.sums:
        for parameter in model.parameters():
            parameter.grad *= dist.get_world_size()
    if options.divide == "gradients":
        for parameter in model.parameters():
            parameter.grad /= PASSES
    if options.mistake == "layer":
        model.module[2].weight.grad *= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.tensor(total)
    dist.all_reduce(total)
    logged.append(total.item() / dist.get_world_size())
dist.destroy_process_group()
