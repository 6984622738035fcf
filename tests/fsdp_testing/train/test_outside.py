"""A parameter beside the model, as a temperature, is compared by itself; each rank's own shards of a flat copy are not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.train.function import TrainingDiffers

SIZES = (1, 2)


def trains(world, *, reduces, steps=3):
    """The loss is a sum of a part of the model and a part of the bound beside it: no gradient of the model tells of it."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    bound = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = torch.optim.SGD([*plain.parameters(), bound], lr=0.1)
    data = torch.randn(12, 3, dtype=torch.float64)[world.rank :: world.size]
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data).square().mean() + (bound - data[:, 0]).square().mean()).backward()
        if reduces and world.size > 1:
            dist.all_reduce(bound.grad)
            bound.grad /= world.size
        optimizer.step()
    return {"weight": plain.weight.detach()}


def reduces_its_gradient(world):
    return trains(world, reduces=True)


def does_not_reduce_its_gradient(world):
    return trains(world, reduces=False)


def test_a_parameter_beside_the_model_is_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_training(reduces_its_gradient, world_sizes=SIZES)


def test_a_parameter_beside_the_model_that_is_not_reduced_fails_and_is_named():
    message = r"number 0 outside of the model, of shape \[\].*gradients of 1 of 3 parameters are not reduced"
    with pytest.raises(TrainingDiffers, match=message):
        check_training(does_not_reduce_its_gradient, world_sizes=SIZES)


def steps_its_own_shard(world):
    """Each rank steps its part of one flat copy, the gradient of which it makes by hand."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    flat = torch.zeros(8, dtype=torch.float64)
    shard = nn.Parameter(flat.chunk(world.size)[world.rank].clone())
    optimizer = torch.optim.SGD([shard], lr=0.1)
    data = torch.randn(12, 3, dtype=torch.float64)[world.rank :: world.size]
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    for _ in range(3):
        plain.zero_grad()
        (model(data) - 1).square().mean().backward()
        gradient = nn.utils.parameters_to_vector(parameter.grad for parameter in plain.parameters())
        shard.grad = gradient.chunk(world.size)[world.rank].clone()
        optimizer.step()
        parts = [torch.empty_like(shard) for _ in range(world.size)]
        if world.size > 1:
            dist.all_gather(parts, shard.detach())
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.cat(parts if world.size > 1 else [shard]), plain.parameters())
    return {"weight": plain.weight.detach()}


def test_shards_of_a_flat_copy_are_no_parameters_beside_the_model():
    check_training(steps_its_own_shard, world_sizes=SIZES)
