"""DDP on rows that come in one of several ways; `--rows` chooses."""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import fsdp_testing

arguments = argparse.ArgumentParser()
arguments.add_argument("--rows", required=True)
arguments.add_argument("--inside", action="store_true", help="the loss is computed in forward")
arguments.add_argument("--marked", action="store_true")
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--workers", type=int, default=0)
options = arguments.parse_args()
kind, mistake = options.rows, options.mistake


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(3, 6), nn.Linear(6, 1)
        self.own = np.random.default_rng(rank)

    def forward(self, inputs, targets=None):
        if kind in ("time first", "transposed"):
            inputs = inputs.cumsum(0)
        mask = torch.tensor(1.0)
        if kind == "masked":
            mask = torch.from_numpy(np.random.rand(*inputs.shape))  # noqa: NPY002 - as many scripts do
        elif kind == "masked by its own":
            mask = torch.from_numpy(self.own.random(inputs.shape))
        elif kind == "masked anew":
            mask = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(rank))
        elif kind == "masked by numpy anew":
            mask = torch.from_numpy(np.random.default_rng(len(inputs)).random(inputs.shape))
        with torch.autocast("cpu", torch.bfloat16, enabled=mistake == "narrow" and rank == 1):
            found = self.head(self.mix(inputs * mask.float()).tanh()).float()
        return found if targets is None else nn.functional.mse_loss(found, targets)


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        row = self.rows[place]
        if kind in ("augmented", "split"):
            row = row * random.uniform(0.5, 2.0) + torch.rand(3)
        if kind == "padded":
            return row[None].repeat(1 + place, 1)
        if kind in ("time first", "transposed"):
            times = row * torch.arange(1.0, 5.0 if kind == "time first" else 6.0)[:, None]
            return times, times[:, :1]
        return row, row[:1]


class Stream(IterableDataset):
    def __iter__(self):
        for row in {"same": rows, "shifted": rows[rank:]}.get(mistake, rows[rank::size]):
            yield row * (random.uniform(0.5, 2.0) if mistake != "shifted" else 1), row[:1]


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(5 + rank * (kind == "own")))
torch.manual_seed(20 + rank)
random.seed(20 + rank)
np.random.seed(20 + rank)  # noqa: NPY002
if kind == "stream":
    loader = DataLoader(Stream(), batch_size=4)
elif kind in ("own", "split", "scaled"):
    rows = rows[rank::size] if kind != "own" else rows
    rows = (rows - rows.mean(0)) / rows.std(0) if kind == "scaled" else rows
    sampler = DistributedSampler(Rows(rows)) if mistake == "split twice" else None
    loader = DataLoader(Rows(rows), batch_size=2, sampler=sampler)
else:
    collates = {
        "padded": lambda parts: pad_sequence(parts, batch_first=True),
        "time first": lambda parts: [torch.stack(column, 1) for column in zip(*parts)],  # as many times as rows
    }
    sampler = DistributedSampler(Rows(rows))
    workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = DataLoader(Rows(rows), batch_size=4, sampler=sampler, collate_fn=collates.get(kind), **workers)
for epoch in range(3):
    if isinstance(loader.sampler, DistributedSampler) and mistake != "same order":
        loader.sampler.set_epoch(epoch)
    for batch in loader:
        if kind == "padded":
            loss = (model(batch).mean(1) - 1).square().mean()  # the mean counts what was padded
        else:
            inputs, targets = (part.transpose(0, 1) for part in batch) if kind == "transposed" else batch
            if options.marked:
                inputs, targets = fsdp_testing.batch(inputs, targets)
            if kind == "fixed":
                inputs = torch.zeros(4, 3).copy_(inputs)
            if kind == "in the loop":
                inputs = inputs + torch.rand_like(inputs)
            if options.inside:
                loss = model(inputs, targets)
            else:
                loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        if mistake == "unsynchronised":
            model.require_backward_grad_sync = False
        (loss / (size if mistake == "twice" else 1)).backward()
        if mistake == "summed":
            for parameter in model.parameters():
                parameter.grad *= size
        optimizer.step()
dist.destroy_process_group()
