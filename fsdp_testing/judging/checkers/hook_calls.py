"""Checks when the user's reduction was called, and what it was given. Pure: from recorded calls.

A hook is called once for every unit that holds trainable parameters, in every backward that reduces, and never else.
What it is given is the unit's whole gradient on this rank: nothing lost, nothing doubled, not divided. The sum of
squares over all calls of one backward shows that, however an implementation cuts and pads its units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, FailureKind, Finding, RankObservation
from fsdp_testing.judging.checkers.explain import finding


@dataclass(frozen=True, slots=True)
class HookCall:
    """One call of the hook on one rank.

    Attributes:
        operation: Index of the program's operation during which it came.
        numel: Elements of the gradient.
        dtype: Its dtype.
        squares: Sum of squares of its elements, in float64.
        output: Elements of the tensor that takes this rank's span; -1 if there is none.
    """

    operation: int
    numel: int
    dtype: str
    squares: float
    output: int


@dataclass(frozen=True, slots=True)
class HookedObservation(RankObservation):
    """What a rank reports that recorded the calls of its hook.

    Attributes:
        calls: In order.
        expected_squares: For each operation that must call the hook, the sum of squares of this rank's own gradient.
        elements: Number of gradient elements in all units.
    """

    calls: tuple[HookCall, ...] = ()
    expected_squares: Mapping[int, float] | None = None
    elements: int = 0


def check_calls(case: Case, ranks: Sequence[RankObservation], units: int, dtype: str) -> Finding | None:
    """Return what is wrong first with the calls of any rank.

    Args:
        case: The case that ran.
        ranks: What each rank reports; those that recorded no calls say nothing.
        units: Number of units that hold trainable parameters.
        dtype: Dtype in which gradients are computed.
    """
    for rank in ranks:
        for wrong in _wrong(case, rank, units, dtype) if isinstance(rank, HookedObservation) else ():
            return finding(
                case,
                FailureKind.DIVERGED,
                "calls of the communication hook",
                wrong.operation,
                f"the hook was {wrong.sentence}, on rank {rank.rank}",
                ranks=(rank.rank,),
                max_error=wrong.error,
                bound=wrong.bound,
                bound_derivation="4 x elements x u x sum of squares" if wrong.bound is not None else "",
            )
    return None


class _WrongCall(NamedTuple):
    """What is wrong with the calls in one operation."""

    operation: int
    sentence: str
    error: float | None = None
    bound: float | None = None


def _wrong(case: Case, rank: HookedObservation, units: int, dtype: str) -> Iterator[_WrongCall]:
    due = rank.expected_squares or {}
    # Missing and needless calls first: sums over too few or too many calls would only repeat that.
    for index in range(len(case.program)):
        count = sum(call.operation == index for call in rank.calls)
        expected = units if index in due else 0
        if count != expected:
            yield _WrongCall(index, f"called {count} times, expected {expected}")
    size, sharded = case.world.size, case.strategy != "no_shard"
    for call in rank.calls:
        if call.dtype != dtype:
            yield _WrongCall(call.operation, f"given {call.dtype}, expected {dtype}")
        if sharded and call.output * size != call.numel:
            sentence = f"given {call.numel} elements and an output of {call.output} for {size} ranks"
            yield _WrongCall(call.operation, sentence)
        if not sharded and call.output >= 0:
            yield _WrongCall(call.operation, "given an output although nothing is sharded")
    for index, wanted in due.items():
        got = sum(call.squares for call in rank.calls if call.operation == index)
        # Two roundings for each square and sum, and as many as elements for each gradient's own inner products.
        bound = 4 * max(rank.elements, 1) * UNIT_ROUNDOFF[dtype] * abs(wanted)
        if not abs(got - wanted) <= bound:
            sentence = f"given gradients whose squares add up to {got:.6g}, expected {wanted:.6g}"
            yield _WrongCall(index, sentence, abs(got - wanted), bound)
