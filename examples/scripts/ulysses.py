"""Sequence parallelism as Ulysses: an all-to-all turns parts of the sequence into parts of the heads, and back."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn

LENGTH, HEADS, WIDTH = 12, 6, 24


def exchange(tensor, cut, join):
    """(batch, tokens, heads, width of a head): cut one axis by ranks, join the other."""
    parts = [part.contiguous() for part in tensor.chunk(dist.get_world_size(), cut)]
    received = [torch.empty_like(part) for part in parts]
    return torch.cat(list(differentiable.all_to_all(received, parts)), join)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        batch, length, _ = tokens.shape
        parts = self.qkv(tokens).view(batch, length, 3, HEADS, -1).unbind(2)
        q, k, v = (exchange(part, cut=2, join=1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(exchange(mixed, cut=1, join=2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        return self.head(tokens + self.attention(self.norm(tokens)))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens, targets = torch.randn(4, LENGTH, WIDTH, generator=draws), torch.randn(4, LENGTH, 3, generator=draws)
        tokens, targets = tokens.chunk(size, 1)[rank], targets.chunk(size, 1)[rank]
        optimizer.zero_grad()
        F.mse_loss(model(tokens), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
