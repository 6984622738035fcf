"""Wrong numbers are likened to others only where every element agrees."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.checkers.quantities import Expected, Quantity
from fsdp_testing.conformance import run_conformance
from fsdp_testing.explanation.patterns import pattern_of

DUE = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BESIDE = DUE.flip(0) + 1
POINT = {Quantity("value", "a"): Expected(DUE, 1e-12), Quantity("value", "b"): Expected(BESIDE, 1e-12)}
A = Quantity("value", "a")


def words(got: torch.Tensor, due: torch.Tensor = DUE) -> str:
    found = pattern_of(A, got, Expected(due, 1e-12), POINT)
    return "" if found is None else found.words


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (DUE * 0, "zero"),
        (DUE.float().double(), "what is due, rounded to float32"),
        (DUE.bfloat16().double(), "what is due, rounded to bfloat16"),
        (DUE / 2, "1/2 times what is due"),
        (-DUE, "-1 times what is due"),
        (DUE * 1.0001, "1.0001 times what is due"),
        (BESIDE, "what is due of parameter b"),
        (DUE.reshape(-1).roll(1), "what is due, moved by 1 element"),
        (DUE.reshape(-1).roll(6), "what is due, moved by 6 elements"),
        (DUE.t(), "what is due, its elements in other places"),
    ],
)
def test_what_every_element_agrees_with_is_told(got: torch.Tensor, told: str) -> None:
    assert words(got.contiguous()) == told
    other = got.reshape(-1).clone()
    other[3] += 1e-3
    assert words(other) == ""


def test_of_right_numbers_and_of_too_few_nothing_is_told() -> None:
    assert words(DUE) == words(DUE + 1e-13) == words(DUE * torch.nan) == ""
    exactly = pattern_of(A, torch.nextafter(DUE, DUE + 1), Expected(DUE), POINT)
    assert exactly is None
    assert words(torch.tensor([2.0]), torch.tensor([1.0])) == ""
    narrow = DUE.float().double()
    assert words(narrow, narrow) == words(narrow + 1.0, narrow) == ""


def test_a_planted_shift_is_told() -> None:
    report = run_conformance(
        "faults_gradients:NeighboursSpan", checks=("training.gradients_are_means",), world_sizes=(2,)
    )
    explained = [f.shortest for f in report.results[0].findings if f.shortest is not None]
    assert ["and is what is due, moved by 1 element." in one.sentence for one in explained] == [True]
