"""Copying and pickling sharded models: an independent copy that trains, or a clear refusal."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from fsdp_ref import FlatParameter, FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp_ref.wrap import ModuleWrapPolicy

APIS = ["flat", "orig", "composable"]


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 3))
    model[2][1].weight = model[2][0].weight
    return model.double()


def shard(api, strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if api == "composable":
            return fully_shard(net(), policy=ModuleWrapPolicy({nn.Sequential}), strategy=ShardingStrategy[strategy])
        return FullyShardedDataParallel(
            net(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=api == "orig",
        )


def full(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train(model, rank, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 0.1 * (rank + step + 1), dtype=torch.float64)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.covers("OBJ-03", "B077")
@pytest.mark.parametrize("moment", ["new", "trained", "after a forward"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world(2)
def test_a_copy_is_independent_and_trains(world, api, strategy, moment):
    model = shard(api, strategy)
    if moment == "trained":
        train(model, world.rank)
    if moment == "after a forward":
        model(torch.ones(2, 4, dtype=torch.float64))
    before = full(model)
    copied = copy.deepcopy(model)
    assert all(torch.equal(value, before[name]) for name, value in full(copied).items())
    train(copied, world.rank)
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    trained = full(copied)
    assert not any(torch.equal(value, before[name]) for name, value in trained.items())
    train(model, world.rank)
    for name, value in full(model).items():
        assert torch.equal(value, trained[name]), name


@pytest.mark.covers("OBJ-03")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world(2)
def test_pickling_is_refused_clearly(world, api):
    model = shard(api, "FULL_SHARD")
    for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot pickle"):
            save(model)
    train(model, world.rank)


@pytest.mark.covers("OBJ-01", "OBJ-02", "FLAT-15", "CTOR-03")
@pytest.mark.world(2)
def test_the_wrapper_stands_for_its_module(world):
    model = shard("flat", "FULL_SHARD")
    assert "FullyShardedDataParallel(" in str(model)
    assert "(_fsdp_wrapped_module): Sequential" in str(model)
    assert model[0] is model.module[0]
    assert isinstance(model._flat_param, FlatParameter)
    assert type(model._flat_param) is nn.Parameter
    assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    assert model._flat_param._sharded_size == model._flat_param.shape
    with pytest.raises(AttributeError, match="nonexistent"):
        _ = model.nonexistent
