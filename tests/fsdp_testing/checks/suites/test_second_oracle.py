"""DDP's numbers are compared like the oracle's, within twice its bound, and their absence is no verdict."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    ObservedPiece,
    ParameterObservation,
    RaisedError,
    RankObservation,
    Snapshot,
    WorldSpec,
)
from fsdp_testing.checks.suites.watched import PairedObservation, review_pair
from fsdp_testing.errors import HarnessError
from fsdp_testing.oracle.quantities import Expectation, Expected, ExpectedPoint, Quantity

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(1)),))
VALUE = torch.tensor([1.0, 2.0], dtype=torch.float64)


def snapshot(value, index=1):
    held = ParameterObservation(
        "w", (2,), "float64", True, (ObservedPiece(0, 2, value),), (ObservedPiece(0, 2, value),), "float64"
    )
    return Snapshot(index, "end", {"w": held}, {})


def ranks(mine, theirs, **more):
    return [
        PairedObservation(
            r, snapshots=(snapshot(mine),), other=RankObservation(r, snapshots=(snapshot(theirs),), **more)
        )
        for r in range(2)
    ]


def expectation(**notes):
    quantities = {Quantity("value", "w"): Expected(VALUE, 1e-9), Quantity("gradient", "w"): Expected(VALUE, 1e-9)}
    points = (ExpectedPoint(1, quantities, snapshot=True), ExpectedPoint(2, quantities, snapshot=True))
    return Expectation(points, {"w": (2,)}, notes)


def test_equal_numbers_pass_and_so_do_twice_the_bound():
    assert review_pair(CASE, ranks(VALUE, VALUE), expectation()) is None
    assert review_pair(CASE, ranks(VALUE, VALUE + 1.9e-9), expectation()) is None


def test_other_numbers_are_told_against_ddp():
    found = review_pair(CASE, ranks(VALUE, VALUE + 2.1e-9), expectation())
    assert found is not None
    assert found.explanation.startswith("compared with DDP on the same ranks: at the end of the program")
    assert found.bound == pytest.approx(2e-9)
    assert "twice the oracle's bound" in found.bound_derivation


def test_a_ddp_that_did_not_run_is_nobodys_failure():
    error = RaisedError(0, "RuntimeError", "no DDP here", "")
    with pytest.raises(HarnessError, match="no DDP here"):
        review_pair(CASE, ranks(VALUE, VALUE, error=error), expectation())
    with pytest.raises(HarnessError, match="it reported nothing"):
        review_pair(CASE, [RankObservation(0), RankObservation(1)], expectation())


def test_nothing_compared_is_no_pass():
    with pytest.raises(HarnessError, match="something to compare"):
        review_pair(CASE, ranks(VALUE, VALUE), Expectation((), {"w": (2,)}))
