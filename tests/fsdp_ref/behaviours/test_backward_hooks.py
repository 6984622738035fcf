"""Backward hooks of users on units of the composable API: they read full parameters, whenever they were registered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import fully_shard, unshard_params

# Ranks have equal inputs: two additions and a division on each side of a sum of two micro-batches, 2 ** -53 each.
CLOSE = {"rtol": 8 * 2.0**-53, "atol": 0.0}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)).double()


def by_the_weight(module, grads):
    return (grads[0] * (2 + module.weight.detach().sum()),)


def train(model):
    for _ in range(2):
        model(torch.arange(6, dtype=torch.float64).view(2, 3)).sum().backward()


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "copied"])
def test_a_backward_pre_hook_finds_full_parameters(world, when, prepend):
    plain, model = net(), net()
    plain[1].register_full_backward_pre_hook(by_the_weight)
    if when == "before":
        model[1].register_full_backward_pre_hook(by_the_weight, prepend=prepend)
    fully_shard(model[1])
    fully_shard(model)
    if when != "before":
        model[1].register_full_backward_pre_hook(by_the_weight, prepend=prepend)
    if when == "copied":
        model = copy.deepcopy(model)
    train(plain)
    train(model)
    with unshard_params(model, with_grads=True):
        got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, **CLOSE)


@pytest.mark.world(2)
def test_a_hook_that_is_removed_runs_no_more_and_another_is_not_doubled(world):
    model, calls = net(), []
    fully_shard(model[1])
    fully_shard(model)
    first = model[1].register_full_backward_pre_hook(lambda *_: calls.append("first"))
    model[1].register_full_backward_pre_hook(lambda *_: calls.append("second"))
    first.remove()
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert calls == ["second"]
