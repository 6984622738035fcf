"""Sequence parallelism: each rank holds a part of every sequence; norms work on parts, attention on gathered heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Gather(torch.autograd.Function):
    """The parts of all ranks, one after the other; the gradient of a part is the sum of what all ranks have of it."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


LENGTH, WIDTH, VOCABULARY = 8, 12, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, part):
        rank, size = dist.get_rank(), dist.get_world_size()
        normed = self.norm(part)
        keys = Gather.apply(self.key(normed))
        values = Gather.apply(self.value(normed))
        first = rank * (LENGTH // size)
        mask = torch.arange(LENGTH) <= torch.arange(first, first + part.shape[1]).unsqueeze(1)
        return part + F.scaled_dot_product_attention(self.query(normed), keys, values, attn_mask=mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens)))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=data)  # the same on all ranks
        inputs, targets = (part.chunk(size, dim=1)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
        # A part of the mean over all tokens: the ranks' parts add up, and so do their gradients.
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / size
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
