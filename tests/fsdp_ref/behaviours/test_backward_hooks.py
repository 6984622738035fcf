"""Backward hooks of users on units of the composable API: they read full parameters, whenever they were registered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import fully_shard


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)).double()


def by_the_weight(module, grads):
    return (grads[0] * (2 + module.weight.detach().sum()),)


def gradients(model):
    for _ in range(2):
        model(torch.arange(6, dtype=torch.float64).view(2, 3)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


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
    wanted = gradients(plain)
    gathered = gradients(model)
    pieces = [piece for piece in gathered if piece is not None and piece.numel()]
    assert pieces
    whole = torch.cat([grad.reshape(-1) for grad in wanted])
    for piece in pieces:
        assert any(
            torch.allclose(piece.reshape(-1), whole[at : at + piece.numel()], rtol=1e-13, atol=0.0)
            for at in range(whole.numel() - piece.numel() + 1)
        )


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
