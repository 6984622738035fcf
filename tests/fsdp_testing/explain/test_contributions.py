"""A gradient is taken apart into its terms where that is certain, and nothing is said where it is not."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    ObservedPiece,
    ParameterObservation,
    RankObservation,
    Snapshot,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.explain.contributions import Contributions, contributions, of_program
from fsdp_testing.explain.contributions import sentence as sentence_of
from fsdp_testing.oracle.gradient_terms import GradientTerm
from fsdp_testing.oracle.quantities import Expected

PROGRAM = (ForwardBackward(Batch(0)), ZeroGrad(), ForwardBackward(Batch(1), no_sync=True), ForwardBackward(Batch(2)))
CASE = Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM)
SHAPE = (4, 5)
LAST = 3
CALLS = (("a", 0), ("a", 1))


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TERMS = tuple(
    GradientTerm(
        operation, 0, rank, {"w": {use: numbers(100 * operation + 10 * rank + k) for k, use in enumerate(CALLS)}}
    )
    for operation in (0, 2, 3)
    for rank in (0, 1)
)


def whole(term: GradientTerm) -> torch.Tensor:
    return term.uses["w"][CALLS[0]] + term.uses["w"][CALLS[1]]


def total(weights: dict[tuple[int, int], float]) -> torch.Tensor:
    return sum(
        (weights.get((term.operation, term.rank), 0.0) * whole(term) / 2 for term in TERMS),
        torch.zeros(SHAPE, dtype=torch.float64),
    )


SOUND = {(operation, rank): 1.0 for operation in (2, 3) for rank in (0, 1)}


def observed(rank: int, gradient: torch.Tensor, start: int = 0, stop: int = 20) -> RankObservation:
    piece = ObservedPiece(start, stop, gradient.reshape(-1)[start:stop])
    seen = ParameterObservation("w", SHAPE, "float64", True, (), (piece,), "float64")
    return RankObservation(rank, (), (Snapshot(LAST, "end", {"w": seen}, {}),))


def asked(*ranks: RankObservation, terms: tuple[GradientTerm, ...] = TERMS) -> Contributions | None:
    return contributions(LAST, {"w": Expected(total(SOUND), 1e-12)}, ranks, terms)


def sentence(found: Contributions) -> str:
    return sentence_of(found, CASE.world.size, of_program(CASE))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({**SOUND, (2, 1): 0.0}, "lacks operation 2, forward-backward in no_sync, of rank 1"),
        ({**SOUND, (2, 0): 0.0, (2, 1): 0.0}, "lacks operation 2, forward-backward in no_sync"),
        ({**SOUND, (2, 1): 0.0, (3, 1): 0.0}, "lacks the inputs of rank 1"),
        ({**SOUND, (3, 0): 2.0, (3, 1): 2.0}, "counts operation 3, forward-backward, twice"),
        ({**SOUND, (0, 0): 1.0, (0, 1): 1.0}, "still contains operation 0, forward-backward, which was cleared"),
        (dict.fromkeys(SOUND, 2.0), "is 2 times the right values, as if its 2 uses were multiplied"),
        (
            dict.fromkeys(SOUND, 2 / 3),
            "is 2/3 of the right values, as if the sum over ranks were divided by 3 instead of 2",
        ),
        (dict.fromkeys(SOUND, 5 / 4), "is 5/4 times the right values"),
        ({}, "lacks every term"),
        (
            {**SOUND, (2, 1): 0.0, (3, 0): 2.0},
            "lacks operation 2, forward-backward in no_sync, of rank 1, and counts operation 3, forward-backward, of rank 0 "
            "twice",
        ),
    ],
)
def test_what_a_gradient_is_the_sum_of(weights: dict[tuple[int, int], float], expected: str) -> None:
    found = asked(*(observed(rank, total(weights)) for rank in (0, 1)))
    assert found is not None
    assert sentence(found) == f"the gradient of w {expected}"
    assert {(w.operation, w.rank): float(w.got) for w in found.weights if w.got} == pytest.approx(
        {key: weight for key, weight in weights.items() if weight}
    )


def test_shards_are_put_together_and_what_one_rank_has_is_named() -> None:
    wrong = total({**SOUND, (3, 0): 0.0})
    split = asked(observed(0, wrong, 0, 9), observed(1, wrong, 9, 20))
    assert split is not None
    assert sentence(split) == "the gradient of w lacks operation 3, forward-backward, of rank 0"
    alone = asked(observed(0, total(SOUND)), observed(1, wrong))
    assert alone is not None
    assert alone.ranks == (1,)
    assert sentence(alone) == "the gradient of w on rank 1 lacks operation 3, forward-backward, of rank 0"
    own = asked(*(observed(rank, total({(2, rank): 2.0, (3, rank): 2.0})) for rank in (0, 1)))
    assert own is not None
    assert (
        sentence(own) == "the gradient of w on rank 0 comes from this rank's inputs alone, not reduced over the ranks"
    )


def test_one_use_of_several_is_named() -> None:
    wrong = total(SOUND) - sum(term.uses["w"][CALLS[1]] / 2 for term in TERMS if term.operation)
    found = asked(observed(0, wrong), observed(1, wrong))
    assert found is not None
    assert sentence(found) == "the gradient of w lacks its use in call 1 of a"


def test_nothing_is_said_where_it_is_not_certain() -> None:
    assert asked(*(observed(rank, total(SOUND)) for rank in (0, 1))) is None
    noise = numbers(7)
    assert asked(observed(0, noise), observed(1, noise)) is None
    # No small fraction of a term, and a fraction with something besides.
    for wrong in (total({**SOUND, (2, 1): 0.12345}), total({**SOUND, (2, 1): 0.0}) + 1e-9 * noise):
        assert asked(observed(0, wrong), observed(1, wrong)) is None
    # Terms that cannot be distinguished: the same inputs on both ranks.
    alike = tuple(GradientTerm(t.operation, 0, t.rank, TERMS[t.operation and t.operation * 2 - 2].uses) for t in TERMS)
    assert asked(*(observed(rank, total({**SOUND, (2, 1): 0.0})) for rank in (0, 1)), terms=alike) is None
    # More terms than elements.
    assert asked(observed(0, total({}), 0, 3), observed(1, total({}), 0, 0)) is None


def test_the_shape_of_a_defect_is_the_same_on_any_program() -> None:
    one = asked(*(observed(rank, total({**SOUND, (2, 1): 0.0})) for rank in (0, 1)))
    other = asked(*(observed(rank, total({**SOUND, (3, 1): 0.0, (3, 0): 0.0})) for rank in (0, 1)))
    assert one is not None
    assert other is not None
    assert one.shape == other.shape == {(Fraction(1), Fraction(0))}


def _of_four_numbers(weights: dict[int, float]) -> tuple[tuple[GradientTerm, ...], torch.Tensor]:
    """Three backward passes of four ranks: twelve terms of a gradient that has four numbers."""
    terms = tuple(
        GradientTerm(operation, 0, rank, {"w": {CALLS[0]: numbers(100 * operation + 10 * rank)[:2, :2]}})
        for operation in (0, 2, 3)
        for rank in range(4)
    )
    zero = torch.zeros(2, 2, dtype=torch.float64)
    return terms, sum((weights[term.operation] * term.uses["w"][CALLS[0]] / 4 for term in terms), zero)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({0: 0.0, 2: 0.0, 3: 1.0}, "lacks operation 2, forward-backward in no_sync"),
        ({0: 1.0, 2: 1.0, 3: 1.0}, "still contains operation 0, forward-backward, which was cleared"),
        ({0: 0.0, 2: 2.0, 3: 1.0}, "counts operation 2, forward-backward in no_sync, twice"),
    ],
)
def test_more_terms_than_numbers_are_summed_over_ranks(weights: dict[int, float], expected: str) -> None:
    terms, gradient = _of_four_numbers(weights)
    due = _of_four_numbers({0: 0.0, 2: 1.0, 3: 1.0})[1]
    ranks = [observed(rank, gradient, 0, 4) for rank in range(4)]
    sums = contributions(LAST, {"w": Expected(due, 1e-12)}, ranks, terms)
    assert sums is not None
    assert sentence_of(sums, 4, of_program(CASE)) == f"the gradient of w {expected}"


def test_a_term_of_one_rank_among_more_terms_than_numbers_is_not_named() -> None:
    terms, due = _of_four_numbers({0: 0.0, 2: 1.0, 3: 1.0})
    lacking = due - terms[5].uses["w"][CALLS[0]] / 4
    ranks = [observed(rank, lacking, 0, 4) for rank in range(4)]
    assert contributions(LAST, {"w": Expected(due, 1e-12)}, ranks, terms) is None
