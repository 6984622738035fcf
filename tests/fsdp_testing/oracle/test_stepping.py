"""How far off a step may be: the optimizer's own roundings, and those of a gradient that was reduced and never compared."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fsdp_testing.cases.models import loss_of
from fsdp_testing.cases.operations import TrainElsewhere
from fsdp_testing.cases.records import Batch, Case, ModelSpec, OptimizerSpec, Step, WorldSpec
from fsdp_testing.oracle import models, optimizers, oracle

SGD = OptimizerSpec("sgd", {"lr": 0.5, "momentum": 0.9})
ADAM = OptimizerSpec("adamw", {"lr": 0.1, "eps": 1e-3})


def case(*program, optimizer=SGD, dtype="float32"):
    return Case(ModelSpec("mlp", dtype=dtype), WorldSpec(4), tuple(program), seed=5, optimizer=optimizer)


def expected(one):
    """Values and optimizer state after the first operation, by kind, parameter and entry."""
    points = oracle.expect_lockstep(one, None, {}).points
    point = next(point for point in points if point.snapshot and point.index == 0)
    return {(q.kind, q.name, q.part): e for q, e in point.quantities.items() if q.kind in ("value", "optimizer")}


def gradients_of(one, rank):
    plain = models.build_model(one)
    batch = one.program[0].batch
    inputs = models.make_inputs(one, batch, rank)
    loss_of(plain(*inputs.args, **inputs.kwargs)).backward()
    return [parameter.grad for parameter in plain.parameters()]


def stepped(one, order):
    """Each parameter after a step on the mean of these ranks' gradients, added up in this order."""
    plain = models.build_model(one)
    by_rank = [gradients_of(one, rank) for rank in order]
    for parameter, *gradients in zip(plain.parameters(), *by_rank):
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total = total + gradient
        parameter.grad = total / len(order)
    optimizers.build_optimizer(one, plain.parameters()).step()
    return dict(plain.named_parameters())


# In one of these draws the mean of three ranks is so near 0 that its rounding decides the direction of AdamW's first step.
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("optimizer", "dtype"), [(SGD, "bfloat16"), (ADAM, "float16")], ids=["sgd", "adamw"])
def test_gradients_of_elsewhere_may_be_added_up_in_any_order(optimizer, dtype, seed):
    one = replace(case(TrainElsewhere(Batch(seed), ranks=3), optimizer=optimizer, dtype=dtype), seed=seed)
    bounds = expected(one)
    for order in itertools.permutations(range(3)):
        for name, parameter in stepped(one, order).items():
            known = bounds["value", name, ""]
            assert bool(((parameter.detach() - known.value).abs() <= known.bound).all())


def test_a_rank_that_is_left_out_is_beyond_the_bound():
    one = case(TrainElsewhere(Batch(0), ranks=3))
    bounds = expected(one)
    off = []
    for name, parameter in stepped(one, (0, 1)).items():
        known = bounds["value", name, ""]
        off.append(bool(((parameter.detach() - known.value).abs() > known.bound).any()))
    assert any(off)


def test_a_step_elsewhere_has_the_roundings_of_a_step():
    elsewhere, here = expected(case(TrainElsewhere(Batch(0), ranks=1))), expected(case(Step()))
    for key in (key for key in here if key[0] == "value"):
        assert all(bool((torch.as_tensor(each[key].bound) > 0).any()) for each in (elsewhere, here))
