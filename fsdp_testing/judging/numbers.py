"""Compares the numbers of a case with the oracle's, with what widens a bound or makes it worthless."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, Finding, RankObservation
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.tensors import largest as largest_of

_ROUNDINGS_OF_A_PART = 64
"""Roundings of a part in a narrower dtype: its inner products, several times over."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The result of comparing the numbers.

    Attributes:
        tally: What was compared, what diverges and what stays undecided.
        expectation: The oracle's values; None where the fast path found everything right.
        problem: Why the oracle cannot decide; empty if it can.
        fast: The fast path found everything right.
        finding: The refuting finding, if its words differ from a divergence's.
    """

    tally: Compared
    expectation: Expectation | None = None
    problem: str = ""
    fast: bool = False
    finding: Finding | None = None

    @property
    def decided(self) -> bool:
        """Whether a more exact expectation would change nothing."""
        return not self.tally.divergences and not self.tally.undecided


def compare_numbers(
    case: Case, expectation: Expectation, ranks: Sequence[RankObservation], comparison: Comparison
) -> Numbers:
    """Compare what all ranks report with what the oracle expects of `case`."""
    # In lockstep the oracle makes the same casts at the same places, from the same numbers.
    if expectation.notes.get("mode") == "free":
        expectation = _widened(expectation, case)
    precision = case.mixed_precision if "low_gradients" in case.wrapping.settings else None
    of_case = replace(
        comparison,
        tensor_parallel=case.world.tensor_parallel,
        gradient_dtype=None if precision is None else precision.reduce_dtype or precision.param_dtype,
    )
    tally = agreement.compare(expectation, ranks, of_case)
    problem = ""
    complete = bool(expectation.points) and expectation.points[-1].index == len(case.program)
    if tally.divergences and _overflows(expectation, min(divergence.index for divergence in tally.divergences)):
        problem = "the oracle's own numbers overflow"
    # Only if nothing diverges and no rank raised: otherwise that is why the end is missing.
    elif not complete and not tally.divergences and all(rank.error is None for rank in ranks):
        problem = "the oracle did not finish this case; what it saw agrees"
    return Numbers(tally, expectation, problem)


def _widened(expectation: Expectation, case: Case) -> Expectation:
    """Use the narrowest dtype of any part for every rounding: its roundings carry on into all other parts.

    Bound each quantity by its own size: a large weight says nothing of how far roundings move a small gradient.

    The oracle bounds each quantity by the roundings of its own dtype, which is right where all parts have one. Where its
    disturbed replay has met the roundings of the narrow part, its bound is the larger one already, and stays as it is.
    """
    narrow = _narrowest(case)
    if narrow is None:
        return expectation
    unit = _ROUNDINGS_OF_A_PART * UNIT_ROUNDOFF[narrow]
    why = f"; parts in {narrow}: at least {_ROUNDINGS_OF_A_PART} x u x largest"
    points = []
    for point in expectation.points:
        quantities = dict(point.quantities)
        for quantity, expected in point.quantities.items():
            slack = unit * largest_of(expected.value)
            if slack:
                bound = expected.bound
                bound = bound.clamp(min=slack) if isinstance(bound, torch.Tensor) else max(bound, slack)
                quantities[quantity] = replace(expected, bound=bound, derivation=expected.derivation + why)
        points.append(replace(point, quantities=quantities))
    return replace(expectation, points=tuple(points))


def _narrowest(case: Case) -> str | None:
    """The dtype with the fewest digits among those of the inputs and the parts; None if all have one dtype."""
    if case.model.tree is None:
        mixed = "mixed_dtypes" in MODELS[case.model.name].traits
        return ("float32" if case.model.dtype == "float64" else "bfloat16") if mixed else None
    dtypes = {case.model.dtype, *(spec.dtype or case.model.dtype for spec in parameters(case.model.tree))}
    return max(dtypes, key=lambda name: UNIT_ROUNDOFF[name]) if len(dtypes) > 1 else None


def _overflows(expectation: Expectation, index: int) -> bool:
    """Whether a value or a bound up to a point is not finite: then nothing can be said of a difference there.

    What comes later is no excuse: in lockstep the oracle goes on from the implementation's own infinities.
    """
    for point in (point for point in expectation.points if point.index <= index):
        for expected in point.quantities.values():
            bound = torch.as_tensor(expected.bound)
            if not bool(torch.isfinite(bound).all()) or not math.isfinite(largest_of(expected.value)):
                return True
    return False
