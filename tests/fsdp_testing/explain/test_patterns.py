"""Wrong numbers are likened to others only where every element agrees."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.explain.compared_pieces import ComparedPiece
from fsdp_testing.explain.patterns import pattern_of
from fsdp_testing.oracle.quantities import Expected, Quantity

DUE = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BESIDE = DUE.flip(0) + 1
A, B, SQUARES = Quantity("value", "a"), Quantity("value", "b"), Quantity("optimizer", "a", "exp_avg_sq")
POINT = {A: Expected(DUE, 1e-12), B: Expected(BESIDE, 1e-12), Quantity("gradient", "a"): Expected(DUE.sin())}
STATE = Quantity("optimizer", "a", "exp_avg")
MOMENTS = {STATE: Expected(DUE), SQUARES: Expected(DUE.square())}


def words(got: torch.Tensor, due: torch.Tensor = DUE) -> str:
    flat = due.reshape(-1)
    found = pattern_of([ComparedPiece(A, 0, (0, flat.numel()), got.reshape(-1), flat, 1e-12)], POINT)
    return "" if found is None else found.words


def spread(*parts: torch.Tensor, quantity: Quantity = A) -> str:
    """What the halves of `DUE` are like on two ranks."""
    due = DUE.reshape(2, -1)
    pieces = [
        ComparedPiece(quantity, rank, (6 * rank, 6 * rank + 6), part, due[rank]) for rank, part in enumerate(parts)
    ]
    found = pattern_of(pieces, POINT if quantity == A else MOMENTS)
    return "" if found is None else found.words


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (DUE * 0, "zero"),
        (DUE.float().double(), "the right values, rounded to float32"),
        (DUE.bfloat16().double(), "the right values, rounded to bfloat16"),
        (DUE / 2, "1/2 times the right values"),
        (-DUE, "-1 times the right values"),
        (DUE * 1.0001, "1.0001 times the right values"),
        (BESIDE, "the right values of parameter b"),
        (DUE.reshape(-1).roll(1), "the right values, moved by 1 element"),
        (DUE.reshape(-1).roll(6), "the right values, moved by 6 elements"),
        (DUE.reshape(-1).flip(0), "the right values in reverse, inside each rank's part"),
        (DUE.t(), "the right values, their elements in other places"),
        (DUE.clamp(-1, 1), "the right values, cut off at 1"),
        (DUE.where(DUE.abs() > 0.5, 0 * DUE), "the right values, with their smallest numbers set to zero"),
        (DUE + 0.5 * DUE.sin(), "the right values, moved by 0.5 times their gradient"),
        (torch.cat([DUE.reshape(-1)[:-2], torch.zeros(2)]), "the right values, with zero in their last 2 elements"),
        (DUE.float(), "the right values, cast to float32"),
    ],
)
def test_what_every_element_agrees_with_is_told(got: torch.Tensor, expected: str) -> None:
    assert words(got.contiguous()) == expected
    other = got.reshape(-1).clone()
    other[3] += 1e-3
    assert words(other) == ""


def test_each_rank_is_asked_by_itself() -> None:
    first, second = DUE.reshape(2, -1)
    assert spread(first, second * 3) == "3 times the right values"
    assert spread(first.roll(1), second.roll(1)) == "the right values, moved by 1 element inside each rank's part"
    assert spread(first, first) == "the right values of the part of rank 0"
    assert spread(first.square(), second.square(), quantity=STATE) == "the right values of exp_avg_sq"
    assert spread(first * 2, second * 3) == spread(first, second.roll(1) + 1) == spread(first, second) == ""
    whole = ComparedPiece(
        Quantity("result", "state.a", "", 0), 0, (0, 12), torch.cat([first, second * 0]), DUE.reshape(-1)
    )
    found = pattern_of([whole], {})
    assert found is not None
    assert found.words == "the right values, with zero in their last 6 elements"
    own = ComparedPiece(whole.quantity, 0, whole.span, torch.cat([first * 0, second]), whole.due, own=((6, 12),))
    found = pattern_of([own], {})
    assert found is not None
    assert found.words.startswith("the right values in the rank's own part, and zero")


def test_of_right_numbers_and_of_too_few_nothing_is_told() -> None:
    assert words(DUE) == words(DUE + 1e-13) == words(DUE * torch.nan) == ""
    assert words(torch.tensor([2.0]), torch.tensor([1.0])) == ""
    norms = [
        ComparedPiece(Quantity("result", "n", "", r), r, (0, 1), torch.tensor([3.0]), torch.tensor([1.0]))
        for r in (0, 1)
    ]
    assert pattern_of(norms, {}) is None
    narrow = DUE.float().double()
    assert words(narrow, narrow) == words(narrow + 1.0, narrow) == ""


def test_a_last_place_is_neither_a_factor_nor_another_order() -> None:
    def expected(got: torch.Tensor) -> str:
        found = pattern_of([ComparedPiece(A, 0, (0, 12), got.reshape(-1), DUE.reshape(-1))], POINT)
        return "" if found is None else found.words

    assert expected(torch.nextafter(DUE, DUE + 1)) == "the right values but for one unit in the last place"
    two = torch.nextafter(torch.nextafter(DUE, DUE + 1), DUE + 1)
    assert expected(two) == ""


def test_a_cast_that_was_not_made_is_told() -> None:
    held = ComparedPiece(Quantity("buffer", "a", "", 0), 0, (0, 12), DUE.reshape(-1), DUE.reshape(-1).float())
    found = pattern_of([held], {})
    assert found is not None
    assert found.words == "the right number, left in float64, not cast to float32"


def test_texts_of_another_length_are_wrong_and_like_nothing() -> None:
    """A list of names is compared as numbers; one that was too long ended the explanation of every failure of a run."""
    piece = ComparedPiece(Quantity("result", "names", "", 0), 0, (0, 3), torch.arange(5), torch.arange(3))
    assert piece.wrong
    assert not piece.is_like(Expected(torch.arange(3)))
    assert pattern_of([piece], {}) is None
