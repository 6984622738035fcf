"""What widens a bound, and what makes the oracle's numbers worthless, is the same whoever ran the case."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    OperationResult,
    RankObservation,
    WorldSpec,
)
from fsdp_testing.judging.numbers import compare_numbers
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected, ExpectedPoint, Quantity

ALL_NARROW = {"width": 2, "nodes": [{"kind": "linear", "dtype": "float32", "name": "a"}]}
MIXED = next(name for name, model in MODELS.items() if "mixed_dtypes" in model.traits)
LOSS = Quantity("result", "loss", rank=0)


def compared(model: str | dict, seen: float, expected: float = 1.0, bound: float = 0.0, mode: str = "free"):
    spec = ModelSpec(model) if isinstance(model, str) else ModelSpec("tree", dtype="float64", tree=model)
    case = Case(spec, WorldSpec(1), (ForwardBackward(Batch(0)),))
    value = torch.tensor(expected, dtype=torch.float64)
    point = ExpectedPoint(0, {LOSS: Expected(value, bound)})
    result = OperationResult(0, {"loss": torch.tensor(seen, dtype=torch.float64)})
    expectation = Expectation((point,), {}, {"mode": mode})
    return compare_numbers(case, expectation, [RankObservation(0, (result,))], Comparison())


@pytest.mark.parametrize(
    ("model", "mode", "off", "diverges"),
    [
        (MIXED, "free", 1e-7, False),
        (MIXED, "free", 1e-4, True),
        (MIXED, "lockstep", 1e-7, True),
        ("mlp", "free", 1e-7, True),
        (ALL_NARROW, "free", 1e-7, False),  # its inputs and its loss are in float64
        (ALL_NARROW, "free", 1e-4, True),
        ({**ALL_NARROW, "nodes": [{"kind": "linear", "name": "a"}]}, "free", 1e-7, True),
    ],
)
def test_parts_in_a_narrower_dtype_widen_the_bounds_of_a_free_replay(model, mode, off, diverges):
    assert bool(compared(model, 1.0 + off, mode=mode).tally.divergences) is diverges


@pytest.mark.parametrize(("off", "diverges"), [(1e-9, False), (1e-5, True)])
def test_a_large_number_gives_no_room_to_a_small_one_beside_it(off: float, diverges: bool):
    """A gradient of a thousandth beside a weight of a thousand."""
    weight, gradient = (Expected(torch.tensor(size, dtype=torch.float64), 0.0) for size in (1e3, 1e-3))
    point = ExpectedPoint(
        0, {Quantity("result", "weight", rank=0): weight, Quantity("result", "gradient", rank=0): gradient}
    )
    case = Case(ModelSpec("tree", dtype="float64", tree=ALL_NARROW), WorldSpec(1), (ForwardBackward(Batch(0)),))
    seen = {"weight": torch.tensor(1e3, dtype=torch.float64), "gradient": torch.tensor(1e-3 + off, dtype=torch.float64)}
    ranks = [RankObservation(0, (OperationResult(0, seen),))]
    numbers = compare_numbers(case, Expectation((point,), {}, {"mode": "free"}), ranks, Comparison())
    assert bool(numbers.tally.divergences) is diverges


def test_of_numbers_that_overflow_nothing_is_said():
    numbers = compared("mlp", 2.0, float("inf"))
    assert numbers.tally.divergences
    assert numbers.problem == "the oracle's own numbers overflow"
    assert not compared("mlp", 2.0).problem


@pytest.mark.parametrize(("overflows", "decided"), [(0, False), (1, True)])
def test_what_overflows_after_a_difference_does_not_excuse_it(overflows: int, decided: bool):
    """In lockstep the oracle goes on from the implementation's infinities, and silently infinite gradients were unknown."""
    infinite = float("inf")
    values = [torch.tensor(infinite if index >= overflows else 1.0, dtype=torch.float64) for index in (0, 1)]
    points = tuple(ExpectedPoint(index, {LOSS: Expected(value, 0.0)}) for index, value in enumerate(values))
    case = Case(ModelSpec("mlp"), WorldSpec(1), (ForwardBackward(Batch(0)), ForwardBackward(Batch(1))))
    seen = tuple(OperationResult(index, {"loss": torch.tensor(2.0, dtype=torch.float64)}) for index in (0, 1))
    numbers = compare_numbers(
        case, Expectation(points, {}, {"mode": "lockstep"}), [RankObservation(0, seen)], Comparison(lockstep=True)
    )
    assert numbers.tally.divergences
    assert bool(numbers.problem) is not decided


def test_a_bound_that_is_larger_already_stays_as_it_is():
    """Found by a planted fault: a norm over one dtype of two hid behind both bounds added up."""
    assert compared(MIXED, 1.0 + 1.002e-3, bound=1e-3).tally.divergences
