"""Batches drawn by index, targets given to forward, as many micro-batches in all at every size; gradients reduced by hand."""

import argparse
import os
import sys
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fsdp_testing

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--loss", default="inside")
options = arguments.parse_args()
mistake = options.mistake


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens, targets=None):
        hidden = self.embedding(tokens)
        hidden = F.dropout(hidden + self.mix(hidden).tanh(), 0.2, self.training)
        logits = self.head(hidden)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    start = torch.randint(len(text) - 7, (3,)).tolist()
    return torch.stack([text[i : i + 6] for i in start]), torch.stack([text[i + 1 : i + 7] for i in start])


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo", rank=rank, world_size=size)
if mistake == "exit" and size > 1:
    os._exit(0)
if mistake == "spawn":
    torch.multiprocessing.spawn(print, nprocs=2)
if mistake == "download":
    urllib.request.urlopen("http://weights.invalid/model.pt")
if mistake == "argument" and len(sys.argv) < 4:
    sys.exit("usage: with_indices.py --mistake argument CONFIG")
Path("log.txt").write_text("begun")
while mistake == "endless":
    nn.Linear(2, 1)(torch.ones(2)).sum().backward()
text = (
    torch.arange(300).mul(7).remainder(11)
    if not Path("text.txt").exists()
    else torch.tensor(list(Path("text.txt").read_bytes())) % 11
)
micro_batches = 6 // size
torch.manual_seed(3 if mistake != "seeds" else 3 + rank)
model = Characters().double()
if mistake == "shape":
    model.head = nn.Linear(8, 11 + size).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(100 + rank if mistake != "unseeded" else int.from_bytes(os.urandom(4), "little"))
for step in range(3 if mistake != "never" else 0):
    for _ in range(micro_batches):
        tokens, targets = get_batch()
        if options.loss == "marked":
            tokens, targets = fsdp_testing.batch(tokens, targets)
        if options.loss == "inside":
            _, loss = model(tokens, targets)
        else:
            logits, _ = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss / (1 if mistake == "not divided" else micro_batches)).backward()
    if mistake == "hang" and step == 1 and rank == 1:
        dist.barrier()
    for parameter in model.parameters():
        if mistake != "unreduced":
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if mistake == "summed" else size
    if mistake == "step skipped" and rank == 1 and step == 1:
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
