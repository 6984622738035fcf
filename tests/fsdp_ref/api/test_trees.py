"""Accumulation, clipping, a hook and full parameters for whatever was sharded, beside one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, ShardingStrategy
from fsdp_ref.comm_hooks import DefaultState, allreduce_hook, reduce_scatter_hook
from fsdp_ref.composable import clip_grad_norm_, fully_shard, no_sync, register_comm_hook, unshard_params
from fsdp_ref.errors import CommHookError, FsdpRuntimeError, FsdpValueError, RootError
from fsdp_ref.wrap import ModuleWrapPolicy

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 1)).double()


def shard(how, strategy="FULL_SHARD"):
    model, policy = net(), ModuleWrapPolicy({Block})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if how == "composable":
            return fully_shard(model, policy=policy, strategy=ShardingStrategy[strategy])
        if how == "parts":  # no unit around them
            for part in model:
                fully_shard(part, strategy=ShardingStrategy[strategy])
            return model
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True
        )


def loss(model, step, rank):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3) * (rank + 1) + step
    return model(x).square().mean()


def reference(steps, size):
    """Gradients of one process: for each step the mean over the ranks, accumulated."""
    model = net()
    for step in steps:
        (sum(loss(model, step, rank) for rank in range(size)) / size).backward()
    return model


def assert_gradients(model, expected):
    with unshard_params(model, writeback=False, with_grads=True):
        have = {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}
    for name, param in expected.named_parameters():
        torch.testing.assert_close(have[name], param.grad, **CLOSE)


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("how", ["composable", "wrapper", "parts"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_accumulation_without_synchronisation(world, how, strategy):
    model = shard(how, strategy)
    with no_sync(model):
        loss(model, 0, world.rank).backward()
        loss(model, 1, world.rank).backward()
    loss(model, 2, world.rank).backward()
    assert_gradients(model, reference(range(3), world.size))


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("how", ["composable", "wrapper"])
def test_clipping(world, how, norm_type):
    model, expected = shard(how), reference([0], world.size)
    loss(model, 0, world.rank).backward()
    want = nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
    torch.testing.assert_close(clip_grad_norm_(model, 0.01, norm_type), want, **CLOSE)
    assert_gradients(model, expected)


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("how", ["composable", "wrapper", "parts"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_hook_reduces_in_every_unit(world, how, strategy):
    model, seen = shard(how, strategy), []
    given = allreduce_hook if strategy == "NO_SHARD" else reduce_scatter_hook

    def hook(state, *tensors):
        seen.append(state)
        given(state, *tensors)

    state = DefaultState(dist.group.WORLD)
    register_comm_hook(model, state, hook)
    loss(model, 0, world.rank).backward()
    assert seen == [state] * (4 if how == "parts" else 3)
    assert_gradients(model, reference([0], world.size))
    with pytest.raises(CommHookError, match="already registered"):
        register_comm_hook(model, state, hook)


@pytest.mark.world(2)
@pytest.mark.parametrize("how", ["composable", "wrapper"])
def test_what_is_refused(world, how):
    model = shard(how)
    plain = net()
    without_units = pytest.raises(FsdpValueError, match="units at or below it, got Sequential without any")
    with without_units, no_sync(plain):
        pass
    with without_units:
        clip_grad_norm_(plain, 1.0)
    with without_units:
        register_comm_hook(plain, None, print)
    several = shard("parts")
    with pytest.raises(FsdpValueError, match="expected one outermost unit, got Linear, Block, Block, Linear"):
        clip_grad_norm_(several, 1.0)
    loss(model, 0, world.rank).backward()
    inner = model[1]
    with pytest.raises(RootError), no_sync(inner):
        pass
    with pytest.raises(RootError):
        clip_grad_norm_(inner, 1.0)
    with pytest.raises(CommHookError, match="root"):
        register_comm_hook(inner, None, print)
    with no_sync(model):
        loss(model, 0, world.rank).backward()
    with pytest.raises(FsdpRuntimeError, match="no_sync"):
        clip_grad_norm_(model, 1.0)


def test_they_have_one_home():
    for name in ("no_sync", "clip_grad_norm_", "register_comm_hook", "unshard_params"):
        assert getattr(fsdp_ref, name) is getattr(fsdp_ref.composable, name)
        assert name in fsdp_ref.__all__
        assert name in fsdp_ref.composable.__all__
