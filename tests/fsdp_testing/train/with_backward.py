"""A contrastive loss over the features of all ranks, of a sharded model whose gradients are scaled by their norms."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

arguments = argparse.ArgumentParser()
arguments.add_argument("--mistake", default="none")
mistake = arguments.parse_args().mistake

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    """All ranks' features; their gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, features):
        gathered = [torch.empty_like(features) for _ in range(size)]
        dist.all_gather(gathered, features.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if mistake != "own part":
            dist.all_reduce(gradient)
        return gradient.chunk(size)[rank]


torch.manual_seed(0)
rows, others = torch.randn(60, 5).double(), torch.randn(60, 5).double()
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
mesh = dist.init_device_mesh("cpu", (size,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(5):
    now = slice(step * 12, step * 12 + 12)
    one, two = model(torch.cat([rows[now].chunk(size)[rank], others[now].chunk(size)[rank]])).chunk(2)
    labels = torch.arange(len(one)) + rank * len(one)
    loss = nn.functional.cross_entropy(one @ Gather.apply(two).T, labels)
    if mistake == "own labels":
        loss = loss + 0.1 * nn.functional.cross_entropy(one, torch.arange(len(one)) % 3)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters() if mistake in ("none", "own norm") else ():
        local = mistake == "own norm"
        gradient = parameter.grad.to_local() if local else parameter.grad
        norm = torch.linalg.vector_norm(gradient)
        parameter.grad.mul_(0.1 / ((norm if local else norm.full_tensor()) + 1e-6))
    optimizer.step()
