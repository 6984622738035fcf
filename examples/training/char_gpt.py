"""A small character GPT: batches drawn by index, micro-batches shared by the ranks, warm-up and decay of the rate."""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch_size, block_size = 4, 16
width, heads, layers = 32, 4, 2
micro_batches = 6  # of all ranks together
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
highest, lowest, warm_up = 1e-2, 1e-3, 4
dtype = os.environ.get("DTYPE", "float32")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, time, _ = x.shape
        q, k, v = (
            part.view(rows, time, heads, width // heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, time, width))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.head(self.ln(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


text = "To shard or not to shard, that is the question: whether 'tis nobler in the mind to gather. " * 20
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in starts])
    return x, y


def rate_at(step):
    if step < warm_up:
        return highest * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return lowest + 0.5 * (1 + math.cos(math.pi * done)) * (highest - lowest)


ddp = "RANK" in os.environ
rank = size = 0
if ddp:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert micro_batches % size == 0
    micro_batches //= size
torch.manual_seed(1337 + rank)
model = GPT(len(characters))
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=highest, betas=(0.9, 0.95))
if ddp:
    model = DistributedDataParallel(model)
raw_model = model.module if ddp else model
context = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()
for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    for micro_step in range(micro_batches):
        if ddp:
            model.require_backward_grad_sync = micro_step == micro_batches - 1
        x, y = get_batch()
        with context:
            _, loss = model(x, y)
            loss = loss / micro_batches
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item() * micro_batches:.4f}")
if ddp:
    dist.destroy_process_group()
