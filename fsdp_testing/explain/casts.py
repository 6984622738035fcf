"""Names the dtype, or the order, in which something was done instead: for wrong numbers whose casts are known one by one.

The oracle replays the same operations, each from the implementation's own state, with other casts: gradients reduced in
another dtype, local micro-batches added up in one, divided at another place, or nothing computed in a lower one. At two
ranks equality is to the bit, so that what agrees is what happened. Of a reduction the dtype must have been on the wire:
another defect may give the same bits. Where nothing agrees, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, MixedPrecisionSpec, RankObservation
from fsdp_testing.explain.compared_pieces import compared_pieces
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.rank_jobs import Otherwise

LockstepOracle = Callable[[Case, Otherwise], Expectation]
"""Replays a case in one process, from the state that the implementation was in before each operation."""

_AS_SAID = Otherwise()


@dataclass(frozen=True, slots=True)
class _Cast:
    """What may have been done: in words, the case that says it, how else it is replayed, and the dtype it needs on the wire."""

    words: str
    precision: MixedPrecisionSpec
    otherwise: Otherwise = _AS_SAID
    wire: str = ""


def other_cast(
    case: Case,
    ranks: Sequence[RankObservation],
    comparison: Comparison,
    oracle: LockstepOracle,
    *,
    reduced_in: Callable[[], Collection[str]],
    division: Division | None = None,
) -> str:
    """Return which cast gives the numbers of the first divergence, in words; empty if none does.

    Args:
        case: The case as one process runs it.
        ranks: What each rank reported, with a snapshot after every operation.
        comparison: How the check compares.
        oracle: Replays other casts.
        reduced_in: Returns the dtypes that ranks gave to sums.
        division: How the implementation says that it divides.
    """
    divergences = agreement.compare(oracle(case, _AS_SAID), ranks, comparison).divergences
    wrong = {divergence.quantity for divergence in divergences}
    for cast in _others(case, division) if wrong else ():
        expected = oracle(replace(case, mixed_precision=cast.precision), cast.otherwise)
        points = (p for p in expected.points if p.index == divergences[0].index and wrong <= set(p.quantities))
        pieces = [piece for point in points for piece in compared_pieces(ranks, point, wrong)]
        agrees = bool(pieces) and not any(piece.wrong for piece in pieces)
        if agrees and {piece.quantity for piece in pieces} == wrong and (not cast.wire or cast.wire in reduced_in()):
            return cast.words
    return ""


def _others(case: Case, division: Division | None) -> Iterator[_Cast]:
    precision, stored = case.mixed_precision or MixedPrecisionSpec(), case.model.dtype
    wire = precision.reduce_dtype or precision.param_dtype or stored
    computed = precision.param_dtype or stored
    if UNIT_ROUNDOFF[computed] > UNIT_ROUNDOFF[wire]:
        words = f"local micro-batches are added up in {computed} where {wire} is due"
        yield _Cast(words, precision, Otherwise(sums=computed))
    for dtype in dict.fromkeys((precision.param_dtype, stored, "float32", "bfloat16", "float16")):
        if dtype is not None and dtype != wire:
            words = f"gradients are reduced in {dtype} where {wire} is due"
            yield _Cast(words, replace(precision, reduce_dtype=dtype), wire=dtype)
    for before, after in ((float(case.world.size), 1.0), (1.0, float(case.world.size))):
        if division is not None and (division.before, division.after) != (before, after):
            when = "before the sum over ranks" if after == 1.0 else "after the sum over ranks"
            words = f"gradients are divided {when}, which is not where the adapter says that they are"
            yield _Cast(words, precision, Otherwise(division=Division(before, after)))
    if precision.param_dtype is not None:
        full = replace(precision, param_dtype=None, reduce_dtype=wire)
        yield _Cast(f"forward and backward run in {stored} where {precision.param_dtype} is due", full)
    if precision.buffer_dtype is not None:
        uncast = replace(precision, buffer_dtype=None)
        yield _Cast(f"buffers are not cast to {precision.buffer_dtype}", uncast)
