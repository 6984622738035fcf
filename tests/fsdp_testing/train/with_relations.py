"""Sequences that collate_fn pads, micro-batches and checkpointing by argument; one mistake on demand."""

import argparse

import rate_of_this_version
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--accumulate", type=int, default=1)
arguments.add_argument("--batch", type=int, default=4)
arguments.add_argument("--checkpoint", action="store_true")
arguments.add_argument("--packing", action="store_true")
arguments.add_argument("--validate", action="store_true")
options = arguments.parse_args()
mistake = options.mistake


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, tokens, targets, row=None):
        mask = torch.ones_like(tokens) if mistake == "padding" else (tokens != 0).long()
        hidden = self.embedding(tokens)
        hidden = checkpoint(self.mix, hidden, use_reentrant=False) if options.checkpoint else self.mix(hidden)
        if mistake == "checkpoint" and options.checkpoint:
            hidden = hidden * 1.01
        values = self.head(hidden.tanh())[..., 0] * mask
        if row is None:
            rows = values.sum(1) / mask.sum(1) - targets
        else:
            which = torch.nn.functional.one_hot(row, len(targets)).double()
            rows = (which.T @ values) / (which.sum(0) if mistake != "packing" else which.sum() / len(targets)) - targets
        weights = torch.linspace(0.5, 1.5, len(rows)).double() if mistake == "order" else torch.ones(len(rows)).double()
        return (weights * rows.square()).mean()


def collate(rows):
    return nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


def pack(rows):
    row = torch.cat([torch.full((len(tokens),), place) for place, (tokens, _) in enumerate(rows)])
    return torch.cat([tokens for tokens, _ in rows]), torch.stack([y for _, y in rows]), row


dist.init_process_group("gloo")
torch.manual_seed(0)
data = [(torch.randint(1, 11, (2 + place % 5,)), torch.randn(()).double()) for place in range(32)]
sampler = DistributedSampler(data, shuffle=options.checkpoint if mistake == "rows" else False)
model = DistributedDataParallel(Mean().double())
rate = rate_of_this_version.RATE * (options.accumulate if mistake == "rate" else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
if mistake == "raise" and options.checkpoint:
    raise ValueError("checkpointing lacks its argument")
if options.validate:
    with torch.no_grad():
        for batch in DataLoader(data[:6], batch_size=2, collate_fn=collate):
            model(*batch)
made = pack if options.packing else collate
for number, batch in enumerate(DataLoader(data, batch_size=options.batch, sampler=sampler, collate_fn=made)):
    loss = model(*batch) / (1 if mistake == "not divided" else options.accumulate)
    loss.backward()
    if (number + 1) % options.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
    elif mistake == "cleared":
        optimizer.zero_grad()
dist.destroy_process_group()
