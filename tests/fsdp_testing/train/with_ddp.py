"""DistributedDataParallel, DataLoader and DistributedSampler; one classic mistake at a time."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--dtype", default="float64")
arguments.add_argument("--accumulate", type=int, default=1)
arguments.add_argument("--dropout", type=float, default=0.0)
arguments.add_argument("--optimizer", default="SGD")
arguments.add_argument("--closure", action="store_true")
arguments.add_argument("--evaluate", action="store_true")
options = arguments.parse_args()
mistake, dtype = options.mistake, getattr(torch, options.dtype)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["LOCAL_RANK"])
torch.manual_seed(7)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(24 + (mistake == "uneven"), 5, generator=draw).to(dtype),
    torch.randn(24 + (mistake == "uneven"), 1, generator=draw).to(dtype),
)
sampler = DistributedSampler(data, shuffle=True) if mistake != "undivided" else None
if mistake == "uneven":
    sampler = list(range(rank, len(data), size))
loader = DataLoader(data, batch_size=4, sampler=sampler)
layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1)]
if mistake == "batch norm":
    layers.insert(1, nn.BatchNorm1d(8))
model = nn.Sequential(*layers).to(dtype)
model[-1].requires_grad_(mistake != "unfrozen")
model = DistributedDataParallel(model)
rate = 0.05 * (size if mistake == "scaled rate" else 1)
parameters = [*model.parameters()]
first = slice(2) if mistake == "one optimizer" else slice(None)
optimizer = getattr(torch.optim, options.optimizer)(parameters[first], lr=rate)
other = torch.optim.SGD(parameters[2:], lr=rate)
steps = 2 * len(loader) * (size if mistake == "counted ranks" else 1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
autocast = options.dtype == "float32" and mistake == "none"
for epoch in range(2):
    if mistake != "same order" and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        if options.closure:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets) / (size if mistake == "twice" else 1)
                loss.backward()
                return loss

            optimizer.step(closure)
            schedule.step()
            continue
        last = (number + 1) % options.accumulate == 0
        model.require_backward_grad_sync = last if mistake != "boundary" else False
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.mse_loss(model(inputs).to(dtype), targets)
        if mistake == "twice":
            loss = loss / size
        if mistake == "loss of own rows":
            loss = loss * (1 + rank)
        (loss / options.accumulate).backward()
        if mistake == "local norm" and rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if not last:
            continue
        if mistake == "none":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if mistake == "limit by ranks":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1 / size)
        optimizer.step()
        if mistake == "one optimizer" and rank == 0:
            other.step()
        if mistake == "clamped on one" and rank == 0:
            model.module[0].weight.data.clamp_(-0.1, 0.1)
        if mistake == "decayed twice":
            for parameter in model.parameters():
                parameter.data.mul_(1 - 0.01 * size)
        schedule.step()
        model.zero_grad()
        model.requires_grad_()
        if mistake == "early stop" and epoch == 0 and number == 1 and loss.item() > 0.5 + 10 * (rank == 0):
            raise SystemExit(0)
    if options.evaluate:
        model.eval()
        with torch.no_grad():
            total = sum(nn.functional.mse_loss(model(inputs), targets, reduction="sum") for inputs, targets in loader)
        dist.all_reduce(total)
        model.train()
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
