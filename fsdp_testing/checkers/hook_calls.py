"""Was the user's reduction called when it must be, and given what it must be given? Pure: from recorded calls.

A hook is called once for every unit that holds trainable parameters, in every backward that reduces, and never else.
What it is given is the unit's whole gradient on this rank: nothing lost, nothing doubled, not divided. The sum of
squares over all calls of one backward shows that, however an implementation cuts and pads its units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.checkers.explain import finding
from fsdp_testing.records import UNIT_ROUNDOFF, Case, FailureKind, Finding, RankObservation


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
        if isinstance(rank, HookedObservation):
            found = _wrong_number(case, rank, units) or _wrong_tensors(case, rank, dtype)
            if found is not None:
                return found
    return None


def _wrong_number(case: Case, rank: HookedObservation, units: int) -> Finding | None:
    wanted = rank.expected_squares or {}
    for index in range(len(case.program)):
        count = sum(call.operation == index for call in rank.calls)
        expected = units if index in wanted else 0
        if count != expected:
            return _finding(case, rank, index, f"the hook was called {count} times, expected {expected}")
    return None


def _wrong_tensors(case: Case, rank: HookedObservation, dtype: str) -> Finding | None:
    for call in rank.calls:
        if call.dtype != dtype:
            return _finding(case, rank, call.operation, f"the hook was given {call.dtype}, expected {dtype}")
        sharded = case.strategy != "no_shard"
        if sharded and call.output * case.world.size != call.numel:
            sentence = (
                f"the hook was given {call.numel} elements and an output of {call.output} for {case.world.size} ranks"
            )
            return _finding(case, rank, call.operation, sentence)
        if not sharded and call.output >= 0:
            return _finding(case, rank, call.operation, "the hook was given an output although nothing is sharded")
    for index, expected in (rank.expected_squares or {}).items():
        got = sum(call.squares for call in rank.calls if call.operation == index)
        # Two roundings for each square and sum, and as many as elements for each gradient's own inner products.
        bound = 4 * max(rank.elements, 1) * UNIT_ROUNDOFF[dtype] * abs(expected)
        if not abs(got - expected) <= bound:
            sentence = f"the hook was given gradients whose squares add up to {got:.6g}, expected {expected:.6g}"
            return _finding(case, rank, index, sentence, abs(got - expected), bound)
    return None


def _finding(
    case: Case,
    rank: HookedObservation,
    index: int,
    sentence: str,
    error: float | None = None,
    bound: float | None = None,
) -> Finding:
    return finding(
        case,
        FailureKind.DIVERGED,
        "calls of the communication hook",
        index,
        f"{sentence}, on rank {rank.rank}",
        ranks=(rank.rank,),
        max_error=error,
        bound=bound,
        bound_derivation="4 x elements x u x sum of squares" if bound is not None else "",
    )
