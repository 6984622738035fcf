"""Ranks that have their parts of one model, and take the same rows. One classic mistake at a time."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import fsdp_testing

arguments = argparse.ArgumentParser()
arguments.add_argument("--kind", choices=["tensor", "dtensor", "stages", "sequence"])
arguments.add_argument("--mistake", default="none")
arguments.add_argument("--mark", action="store_true")
arguments.add_argument("--mark-parts", action="store_true")
arguments.add_argument("--loader", action="store_true")
options = arguments.parse_args()
mistake = options.mistake
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if mistake == "seed of the rank" else 0)


class Copied(torch.autograd.Function):
    """Nothing in forward; gradients are added up in backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if mistake != "input gradient":
            dist.all_reduce(gradient)
        return gradient


class AddedUp(torch.autograd.Function):
    """Added up in forward; nothing in backward."""

    @staticmethod
    def forward(ctx, inputs):
        inputs = inputs.clone()
        dist.all_reduce(inputs)
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gathered(torch.autograd.Function):
    """The parts of all ranks one after the other; of the gradient, summed over ranks, this rank's part."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(size, dim=1)[rank]


class Block(nn.Module):
    """Column- and row-parallel."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        wide, narrow = torch.randn(8, 6), torch.randn(6, 8)
        self.up = nn.Parameter(wide.chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(torch.zeros(8 // size))
        self.down = nn.Parameter(narrow.chunk(size, dim=1)[rank].clone())

    def forward(self, hidden):
        wide = nn.functional.linear(Copied.apply(self.norm(hidden)), self.up, self.up_bias).tanh()
        if mistake == "bias of each":
            return hidden + AddedUp.apply(nn.functional.linear(wide, self.down) + 0.1)
        return hidden + AddedUp.apply(nn.functional.linear(wide, self.down))


class Attention(nn.Module):
    """Over all positions, of which each rank has some."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, part):
        normed = self.norm(part)
        weights = (self.query(normed) @ Gathered.apply(self.key(normed)).transpose(1, 2)).softmax(-1)
        return part + weights @ Gathered.apply(normed)


def divide_by_own_norm(parameters):
    parameters = [*parameters]
    norm = sum(parameter.grad.square().sum() for parameter in parameters)
    for parameter in parameters:
        parameter.grad.mul_(0.1 / norm.sqrt())


def train(model, steps=3):
    for parameter in model.parameters() if mistake == "parts sent" else ():
        dist.broadcast(parameter.data, 0)
    rate = 0.1 * (1 + rank if mistake == "rate of the rank" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * steps, 8, 6, generator=draw), torch.randn(4 * steps, 8, 6, generator=draw))
    # Without a loader nobody sees where rows are taken.
    batches = DataLoader(data, 4) if options.loader else zip(*(rows.split(4) for rows in data.tensors))
    for inputs, targets in batches:
        if options.mark:
            inputs, targets = fsdp_testing.batch(inputs, targets)
        if options.kind == "sequence":
            inputs, targets = (whole.chunk(size, dim=1)[rank] for whole in (inputs, targets))
        if options.mark_parts:
            inputs, targets = fsdp_testing.batch(inputs, targets)
        backward(model, inputs, targets)
        if options.kind == "sequence":
            for name, parameter in model.named_parameters():
                if mistake != "norm not reduced" or "norm" not in name:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
        if mistake == "summed" and rank == 0:
            next(iter(model.parameters())).grad.mul_(size)
        divide_by_own_norm(model.parameters() if mistake == "own norm" else ())
        optimizer.step()
        optimizer.zero_grad()


def backward(model, inputs, targets):
    if options.kind != "stages":
        (model(inputs) - targets).square().mean().backward()
        return
    if rank:
        inputs = torch.empty_like(inputs)
        dist.recv(inputs, rank - 1)
        inputs.requires_grad_()
    outputs = model(inputs)
    if rank < size - 1:
        dist.send(outputs.detach(), rank + 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
    else:
        (outputs - targets).square().mean().backward()
    if rank:
        dist.send(inputs.grad / (size if mistake == "divided" else 1), rank - 1)


if options.kind == "tensor":
    train(nn.Sequential(nn.Linear(6, 6), Block(), Block()))
elif options.kind == "dtensor":
    mesh = init_device_mesh("cpu", (size,))
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    train(parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))
elif options.kind == "sequence":
    train(nn.Sequential(Attention(), nn.Linear(6, 6)))
else:
    layers = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    count = len(layers) // size
    train(nn.Sequential(*layers[rank * count : (rank + 1) * count]))
dist.barrier()
dist.destroy_process_group()
