"""Sentences: schedule, what is wrong with numbers and bound, and what it equals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from fsdp_testing.cases.records import Batch, Case, Finding, Forward, ForwardBackward, ModelSpec, Step, WorldSpec
from fsdp_testing.explain.contributions import Contributions, Weight
from fsdp_testing.explain.hypotheses import Hypothesis
from fsdp_testing.explain.root_causes import render, units_text
from fsdp_testing.judging.checkers.explain import ranks_text

PROGRAM = (ForwardBackward(Batch(0), no_sync=True), ForwardBackward(Batch(1)), Step(), Forward(Batch(2), "eval"))
CASE = Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM)
RESULT, GRADIENT = frozenset({"result"}), frozenset({"gradient"})


def finding(**fields: Any) -> Finding:
    values: dict[str, Any] = {
        "kind": "diverged",
        "quantity": "loss on rank 0",
        "operation": 3,
        "operation_text": "operation 3 forward(batch 2, mode='eval')",
        "ranks": (0,),
        "explanation": "after operation 3 forward(batch 2, mode='eval'): loss on rank 0 is off by 0.37; 2 more",
        "case": CASE,
        "max_error": 0.37,
        "bound": 2e-12,
    }
    return Finding(**{**values, **fields})


LACKS_RANK_1 = tuple(
    Weight(operation, 0, rank, None, Fraction(1), Fraction(1 - rank)) for operation in (0, 1) for rank in (0, 1)
)
GRADIENT_FINDING = {
    "quantity": "gradient of a.weight",
    "operation": 1,
    "ranks": (0, 1),
    "operation_text": "operation 1",
}


@pytest.mark.parametrize(
    ("fields", "like", "held", "said"),
    [
        (
            {},
            None,
            {},
            "After forward-backward in no_sync, forward-backward, step then eval-forward: loss on rank 0 is wrong "
            "(max error 0.37, bound 2e-12).",
        ),
        (
            {},
            Hypothesis(2, RESULT, ("blocks.1",)),
            {"blocks.1": (0, 1)},
            "After forward-backward in no_sync, forward-backward, step then eval-forward: unit `blocks.1` still holds the "
            "weights from before operation 2, step, on ranks 0 and 1; loss on rank 0 is wrong (max error 0.37, bound "
            "2e-12), and is what one process gives without operation 2 step() for unit `blocks.1`.",
        ),
        (
            {},
            Hypothesis(2, RESULT),
            {},
            "After forward-backward in no_sync, forward-backward, step then eval-forward: the weights from before "
            "operation 2, step, are still in use; loss on rank 0 is wrong (max error 0.37, bound 2e-12), and is what one "
            "process gives without operation 2 step().",
        ),
        (
            {**GRADIENT_FINDING, "bound": 0.0},
            Hypothesis(-1, GRADIENT, contributions=Contributions(LACKS_RANK_1, ("a.weight",), 1)),
            {},
            "After forward-backward in no_sync then forward-backward: the gradient of a.weight lacks the inputs of rank 1; "
            "gradient of a.weight is wrong on ranks 0 and 1 (max error 0.37, expected equal bits), and equals, within the bound, "
            "one process's terms added in that way.",
        ),
        (
            {
                "max_error": None,
                "explanation": "after operation 3 forward(batch 2): loss is None, expected numbers; 2 more",
                "statement": "loss is None, expected numbers",
            },
            None,
            {},
            "After forward-backward in no_sync, forward-backward, step then eval-forward: loss is None, expected numbers.",
        ),
        (
            {
                "kind": "raised",
                "operation": -1,
                "operation_text": "building and wrapping the model",
                "explanation": "in building and wrapping the model: every rank raised ValueError: no",
                "statement": "every rank raised ValueError: no",
                "max_error": None,
            },
            None,
            {},
            "While building and wrapping the model: every rank raised ValueError: no",
        ),
    ],
)
def test_sentences(
    fields: dict[str, Any], like: Hypothesis | None, held: dict[str, tuple[int, ...]], said: str
) -> None:
    assert render(finding(**fields), like, held) == said


def test_ranks_and_units_in_words() -> None:
    assert [ranks_text(ranks) for ranks in ((1,), (0, 2), (0, 1, 2))] == ["rank 1", "ranks 0 and 2", "ranks 0, 1 and 2"]
    assert [units_text(units) for units in (("",), ("a",), ("a", ""))] == [
        "the root unit",
        "unit `a`",
        "units `a` and (root)",
    ]
