"""What a training loop does to parameters by itself, on plain modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_testing.cases.operations.user_code import replace_parameters
from fsdp_testing.errors import InvalidImplementation


def test_other_parameters_take_the_place_of_those_that_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight.requires_grad_(False)
    before = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    first = model[0].weight
    replace_parameters(model, {"0.weight": first.data, "1.weight": model[1].weight.data}, 2.0)
    assert model[0].weight is not first
    assert torch.equal(model[0].weight, 2 * before["0.weight"])
    assert torch.equal(model[0].bias, before["0.bias"])
    assert torch.equal(model[1].weight, 2 * before["1.weight"])
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]


def test_copies_are_the_adapters_mistake():
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidImplementation, match="got copies of weight, bias"):
        replace_parameters(model, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}, 2.0)
