"""Findings look alike when kind, sort of quantity and operation are the same, whatever the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing.checkers.explain_signature import (
    FindingSignature,
    fine_signature_of,
    schedule_shape,
    signature_of,
)
from fsdp_testing.records import (
    Batch,
    Case,
    Finding,
    Forward,
    ForwardBackward,
    ModelSpec,
    Step,
    WorldSpec,
    ZeroGrad,
)

PROGRAM = (ForwardBackward(Batch(0), no_sync=True), ForwardBackward(Batch(1)), Step(), Forward(Batch(2), "eval"))
CASE = Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM)


def finding(**fields: Any) -> Finding:
    values: dict[str, Any] = {
        "kind": "diverged",
        "quantity": "gradient of layers.0.weight",
        "operation": 1,
        "operation_text": "operation 1",
        "ranks": (0,),
        "explanation": "after operation 1: gradient of layers.0.weight is off by 0.3 (bound 1e-14)",
        "case": CASE,
        "max_error": 0.3,
    }
    return Finding(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("diverged", "gradient", "forward_backward")),
        ({"quantity": "parameter a.b", "operation": 2}, ("diverged", "parameter and optimizer state", "step")),
        (
            {"quantity": "optimizer state exp_avg of a.b", "operation": 2},
            ("diverged", "parameter and optimizer state", "step"),
        ),
        ({"quantity": "optimizer state exp_avg of a.b"}, ("diverged", "optimizer state exp_avg", "forward_backward")),
        ({"quantity": "buffer norm.mean on rank 1", "operation": 3}, ("diverged", "buffer", "forward")),
        ({"quantity": "loss on rank 0", "operation": 3}, ("diverged", "output", "forward")),
        ({"quantity": "output 2 on rank 1", "operation": 1}, ("diverged", "output", "forward")),
        ({"quantity": "total norm on rank 1", "operation": 4}, ("diverged", "total norm", "end")),
        (
            {
                "max_error": None,
                "explanation": "after operation 1: gradient of layers.0.weight is None, expected numbers (up to 2)",
            },
            ("diverged", "gradient is None", "forward_backward"),
        ),
        (
            {
                "kind": "raised",
                "quantity": "ValueError",
                "operation": -1,
                "explanation": "in building: rank 1 raised ValueError: 12 is not 'good' for layers.0.weight",
            },
            ("raised", "ValueError: # is not _ for _", "build"),
        ),
        ({"kind": "hung", "quantity": "the run", "operation": -1}, ("hung", "the run", "build")),
    ],
)
def test_what_a_finding_looks_like(fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert signature_of(finding(**fields)) == FindingSignature(*expected)


def test_numbers_and_ranks_do_not_count() -> None:
    other = finding(ranks=(0, 1), max_error=7.0, explanation="after operation 1: gradient of layers.0.weight is off")
    assert signature_of(finding()) == signature_of(other)


def test_place_counts_in_the_fine_signature() -> None:
    fine = fine_signature_of(finding())
    assert (fine.fqn, fine.model, fine.strategy) == ("layers.0.weight", "mlp", "full_shard")
    assert fine != fine_signature_of(finding(quantity="gradient of layers.1.weight"))


def test_a_local_micro_batch_is_a_kind_of_its_own_and_modes_are_not() -> None:
    assert schedule_shape(CASE) == ("forward_backward(no_sync)", "forward_backward", "step", "forward")
    words = [operation.words() for operation in (*PROGRAM, ZeroGrad())]
    assert words == ["forward-backward in no_sync", "forward-backward", "step", "eval-forward", "zero_grad"]
