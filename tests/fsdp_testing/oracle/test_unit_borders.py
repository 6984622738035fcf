"""Gradients are added up as implementations may do it: what a unit uses twice in a call is summed in that call first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdp_testing.cases.records import Case, Reload, WrappingPlan
from fsdp_testing.oracle import disturbance, oracle
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.replay import Replay

CALLED_THRICE = json.dumps(
    {
        "format": "fsdp_testing/case",
        "version": 1,
        "model": {
            "name": "tree",
            "dtype": "float32",
            "tree": {
                "width": 2,
                "nodes": [
                    {
                        "kind": "group",
                        "name": "a",
                        "calls": 3,
                        "nodes": [
                            {
                                "kind": "group",
                                "name": "b",
                                "calls": 2,
                                "nodes": [{"kind": "conv", "name": "c", "channels": 1}],
                            }
                        ],
                    }
                ],
            },
        },
        "world": {"size": 2},
        "program": [{"kind": "forward_backward", "batch": {"seed": 1, "rows": [2]}}],
        "wrapping": {"units": ["a"]},
        "mixed_precision": {},
        "optimizer": {"name": "sgd", "arguments": {"lr": 0.1}},
    }
)


class Summed(nn.Module):
    """Its gradient is the sum of the factors it was called with, in the order of the backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, factor):
        return self.weight * factor


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Summed()

    def forward(self, one, other):
        return self.inner(one) + self.inner(other)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = Twice()

    def forward(self, *factors):
        pairs = zip(factors[::2], factors[1::2])
        return sum(self.unit(one, other) for one, other in pairs)


def gradient(model, *factors):
    model(*(torch.tensor(factor) for factor in factors)).backward()
    return float(model.unit.inner.weight.grad)


# In float32 2**24 + 1 is 2**24 again, and 2**24 + 2 is not.
FACTORS = (1.0, 1.0, 1.0, 1.0, 2.0**23, 2.0**23)


def test_what_a_call_uses_twice_is_added_up_in_that_call():
    plain, parted = Model(), Model()
    disturbance.draw_borders(parted, WrappingPlan(("unit",)))
    assert gradient(plain, *FACTORS) == 2.0**24
    assert gradient(parted, *FACTORS) == 2.0**24 + 4


def test_a_unit_inside_another_keeps_its_parameters_to_itself():
    parted = Model()
    disturbance.draw_borders(parted, WrappingPlan(("unit", "unit.inner")))
    assert gradient(parted, *FACTORS) == 2.0**24


def test_the_model_is_as_before_after_a_call_and_after_one_that_raised():
    parted = Model()
    hooks = disturbance.draw_borders(parted, WrappingPlan(("unit",)))
    seen = []
    parted.unit.inner.register_forward_hook(lambda module, *_: seen.append(module.weight))
    parted(torch.tensor(1.0), torch.tensor(2.0))
    assert [view.is_leaf for view in seen] == [False, False]
    assert seen[0] is seen[1]
    assert parted.unit.inner.weight.is_leaf
    with pytest.raises(TypeError):
        parted(torch.tensor(1.0), "no number")
    assert parted.unit.inner.weight.is_leaf
    for hook in hooks:
        hook.remove()
    assert gradient(parted, *FACTORS) == 2.0**24


def test_the_bound_of_lockstep_allows_for_it():
    one = Case.from_json(CALLED_THRICE)
    quantity = Quantity("gradient", "a.b.c.weight")
    apart = oracle.expect_lockstep(one, None, {}).points[1].quantities[quantity]
    unit = 2.0**-24 * float(apart.value.abs().max())
    assert 0 < float(torch.as_tensor(apart.bound).max()) < 32 * unit
    assert "the units' borders" in apart.derivation
    none = oracle.expect_lockstep(replace(one, wrapping=WrappingPlan()), None, {}).points[1].quantities[quantity]
    assert float(torch.as_tensor(none.bound).max()) == 0.0


def test_loading_into_another_plan_draws_other_borders():
    one = Case.from_json(CALLED_THRICE)
    micro = one.program[0]
    moved = Replay(replace(one, program=(Reload(units=()), micro)), disturbance=Disturbance(0, 0, displaced=True))
    kept = Replay(replace(one, program=(Reload(), micro)), disturbance=Disturbance(0, 0, displaced=True))
    plain = Replay(replace(one, program=(Reload(), micro)))
    for replay in (moved, kept, plain):
        replay.run()
    weight = "a.b.c.weight"
    assert torch.equal(moved.parameters[weight].grad, plain.parameters[weight].grad)
    assert not torch.equal(kept.parameters[weight].grad, plain.parameters[weight].grad)
