"""In which dtype was it done instead? Tried for a case in mixed precision whose numbers are not those of its casts.

The oracle replays the same operations, each from the implementation's own state, with other casts: gradients reduced in
another dtype, or nothing computed in a lower one. At two ranks equality is to the bit, so that what agrees is what
happened. Where nothing agrees, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fsdp_testing.checkers import agreement
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.quantities import Expectation
from fsdp_testing.records import Case, MixedPrecisionSpec, RankObservation

LockstepOracle = Callable[[Case], Expectation]
"""Replays a case in one process, from the state that the implementation was in before each operation."""


def other_cast(case: Case, ranks: Sequence[RankObservation], comparison: Comparison, oracle: LockstepOracle) -> str:
    """Return which cast gives the numbers of the first divergence, in words; empty if none does.

    Args:
        case: A case in mixed precision that diverges.
        ranks: What each rank reported, with a snapshot after every operation.
        comparison: How the check compares.
        oracle: Replays other casts.
    """
    index, wrong = agreement.wrong_numbers(oracle(case), ranks, comparison)
    for happened, precision in _others(case) if wrong else ():
        expected = oracle(replace(case, mixed_precision=precision))
        points = [
            replace(point, quantities={q: one for q, one in point.quantities.items() if q in wrong})
            for point in expected.points
            if point.index == index
        ]
        found = {quantity for point in points for quantity in point.quantities}
        only = replace(expected, points=tuple(points))
        if set(wrong) <= found and agreement.agrees(only, ranks, comparison):
            return happened
    return ""


def _others(case: Case) -> Iterator[tuple[str, MixedPrecisionSpec]]:
    asked, stored = case.mixed_precision, case.model.dtype
    if asked is None:
        return
    wire = asked.reduce_dtype or asked.param_dtype or stored
    for dtype in dict.fromkeys((asked.param_dtype, stored, "float32", "bfloat16", "float16")):
        if dtype is not None and dtype != wire:
            yield f"gradients are reduced in {dtype} where {wire} is due", replace(asked, reduce_dtype=dtype)
    if asked.param_dtype is not None:
        full = replace(asked, param_dtype=None, reduce_dtype=wire)
        yield f"forward and backward run in {stored} where {asked.param_dtype} is due", full
