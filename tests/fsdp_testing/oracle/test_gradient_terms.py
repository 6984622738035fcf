"""The terms of a gradient add up to it, by rank, micro-batch and use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_testing.cases.operations import LocalMicroBatches
from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, WorldSpec
from fsdp_testing.oracle import models
from fsdp_testing.oracle.gradient_terms import ELSEWHERE, gradient_terms
from fsdp_testing.oracle.oracle import expect_free

PROGRAM = (LocalMicroBatches((Batch(0), Batch(1))), ForwardBackward(Batch(2, rows=(3, 0, 1))))


@pytest.mark.parametrize("model", ["mlp", "called_twice", "registered_twice", "batch_norm", "gpt", "moe", "embedding"])
def test_terms_add_up_to_the_gradient(model: str) -> None:
    case = Case(ModelSpec(model), WorldSpec(3), PROGRAM)
    terms = gradient_terms(case, 1)
    assert [(term.operation, term.micro_batch, term.rank) for term in terms] == [
        *((0, micro_batch, rank) for micro_batch in (0, 1) for rank in (0, 1, 2)),
        *((1, 0, rank) for rank in (0, 1, 2)),
    ]
    last = expect_free(case).points[-1]
    gradients = [q for q, expected in last.quantities.items() if q.kind == "gradient" and expected.value is not None]
    assert gradients
    for quantity in gradients:
        due = last.quantities[quantity]
        assert due.value is not None
        parts = [use for term in terms for use in term.uses.get(quantity.name, {}).values()]
        got = sum(parts, torch.zeros_like(due.value)) / 3
        assert float((got - due.value).abs().max()) <= float(due.bound), quantity


def test_uses_are_told_apart() -> None:
    case = Case(ModelSpec("called_twice"), WorldSpec(2), (ForwardBackward(Batch(0)),))
    (first, _) = gradient_terms(case, 0)
    assert set(first.uses["again.weight"]) == {("again", 0), ("again", 1)}
    checkpointed = replace(case, wrapping=replace(case.wrapping, checkpointed=("again",)))
    assert set(gradient_terms(checkpointed, 0)[0].uses["again.weight"]) >= {("again", 0), ("again", 1)}
    registered = Case(ModelSpec("registered_twice"), WorldSpec(2), (ForwardBackward(Batch(0)),))
    assert set(gradient_terms(registered, 0)[0].uses["layer.weight"]) == {("layer", 0), ("layer", 1)}


def test_a_use_outside_modules_is_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)),))
    build = models.build_model

    def build_penalised(case: Case) -> torch.nn.Module:
        module = build(case)
        module.register_forward_hook(lambda m, args, out: out + m.layers[1].weight.sum())
        return module

    (plain, _) = gradient_terms(case, 0)
    monkeypatch.setattr("fsdp_testing.oracle.replay.models.build_model", build_penalised)
    (penalised, _) = gradient_terms(case, 0)
    assert set(plain.uses["layers.1.weight"]) == {("layers.1", 0)}
    assert set(penalised.uses["layers.1.weight"]) == {("layers.1", 0), ELSEWHERE}
