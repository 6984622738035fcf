"""A deep copy that computes something else, or that only some ranks refuse, is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    Observe,
    ObservedPiece,
    ParameterObservation,
    RankObservation,
    Snapshot,
    Step,
    WorldSpec,
)
from fsdp_testing.checks.suites.programs import Copied, CopyingObservation, review_copies
from fsdp_testing.oracle.quantities import Expectation, Expected, ExpectedPoint, Quantity

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (Observe("deepcopy"), ForwardBackward(Batch(1)), Observe()))
GRADIENT = torch.tensor([1.0, 2.0], dtype=torch.float64)
LOSS = torch.tensor(3.0, dtype=torch.float64)


def expectation():
    losses = {Quantity("result", "loss", "", rank): Expected(LOSS, 1e-12) for rank in range(2)}
    gradient = {Quantity("gradient", "w"): Expected(GRADIENT, 1e-12), Quantity("value", "w"): Expected(GRADIENT, 1e-12)}
    here = ExpectedPoint(0, {}, snapshot=True)
    return Expectation((here, ExpectedPoint(1, losses), ExpectedPoint(2, gradient, snapshot=True)), {"w": (2,)})


def copied(gradient=GRADIENT, loss=LOSS):
    held = ParameterObservation(
        "w", (2,), "float64", True, (ObservedPiece(0, 2, GRADIENT),), (ObservedPiece(0, 2, gradient),), "float64"
    )
    return Copied("", {"loss": loss}, Snapshot(0, "deepcopy", {"w": held}, {}))


def ranks(*copies):
    return [CopyingObservation(rank, copied=one) for rank, one in enumerate(copies)]


def test_an_equal_copy_and_a_refusal_everywhere_are_right():
    assert review_copies(CASE, ranks(copied(), copied()), expectation()) is None
    refused = Copied("TypeError: no")
    assert review_copies(CASE, ranks(refused, refused), expectation()) is None


def test_a_copy_with_other_numbers_is_told():
    for wrong in (copied(gradient=GRADIENT * 2), copied(loss=LOSS + 1)):
        found = review_copies(CASE, ranks(wrong, wrong), expectation())
        assert found is not None
        assert found.explanation.startswith("the deep copy: after operation 0 observe(label='deepcopy')")
        assert found.max_error == 2.0 if wrong.results["loss"] is LOSS else found.max_error == 1.0


def test_a_refusal_on_one_rank_only_is_told():
    found = review_copies(CASE, ranks(copied(), Copied("TypeError: no")), expectation())
    assert found is not None
    assert "was refused on some ranks only: TypeError: no, on rank 1" in found.explanation


@pytest.mark.parametrize("program", [CASE.program[1:], CASE.program[:1]], ids=["no copy", "no micro-batch after it"])
def test_a_shortened_case_that_trains_no_copy_has_no_finding(program):
    case = replace(CASE, program=program)
    assert review_copies(case, [RankObservation(0), RankObservation(1)], expectation()) is None


def test_no_copy_at_all_is_no_pass():
    found = review_copies(CASE, [RankObservation(0), RankObservation(1)], expectation())
    assert found is not None
    assert "nothing was copied" in found.explanation


def test_a_copy_whose_gradients_are_hidden_is_judged_by_its_step():
    case = replace(CASE, program=(*CASE.program, Step()))
    after = {Quantity("value", "w"): Expected(GRADIENT, 1e-12)}
    due = expectation()
    due = replace(due, points=(*due.points, ExpectedPoint(4, after, snapshot=True)))

    def stepped(values):
        held = ParameterObservation("w", (2,), "float64", True, (ObservedPiece(0, 2, values),), None, None)
        hidden = replace(copied(), gradients=False, stepped=Snapshot(4, "deepcopy", {"w": held}, {}))
        return replace(
            hidden, snapshot=Snapshot(0, "deepcopy", {"w": replace(held, pieces=(ObservedPiece(0, 2, GRADIENT),))}, {})
        )

    assert review_copies(case, ranks(stepped(GRADIENT), stepped(GRADIENT)), due) is None
    found = review_copies(case, ranks(stepped(GRADIENT * 2), stepped(GRADIENT * 2)), due)
    assert found is not None
    assert "the deep copy: at the end" in found.explanation
