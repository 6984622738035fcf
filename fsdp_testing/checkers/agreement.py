"""Does a run on N ranks give what one process gives, and do the ranks agree with one another?

Compares point by point in the order of the program and stops after the first point at which anything diverges: what
follows is a consequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.divergence import Compared, Divergence
from fsdp_testing.checkers.quantities import Expectation, ExpectedPoint
from fsdp_testing.checkers.results import check_results
from fsdp_testing.checkers.snapshots import absent_snapshot, check_state
from fsdp_testing.errors import HarnessError
from fsdp_testing.records import FailureKind, OperationResult, RankObservation, Snapshot


def compare(expectation: Expectation, ranks: Sequence[RankObservation], comparison: Comparison) -> Compared:
    """Compare all ranks' observations with what the oracle expects.

    Returns:
        The divergences of the first point that has any, and how much was compared on the way. An exception on a rank
        is not a divergence here: comparison ends before the operation that raised.
    """
    tally = Compared()
    last = min((rank.error.index for rank in ranks if rank.error is not None), default=None)
    for point in expectation.points:
        if last is not None and point.index >= last:
            break
        _check_point(tally, point, expectation, ranks, comparison)
        if tally.divergences:
            break
    return tally


def _check_point(
    tally: Compared, point: ExpectedPoint, expectation: Expectation, ranks: Sequence[RankObservation], asked: Comparison
) -> None:
    if not point.snapshot:
        results = [_result(rank, point.index) for rank in ranks]
        if asked.outputs:
            check_results(tally, point, results)
        return
    snapshots = [_snapshot(rank, point.index) for rank in ranks]
    absent = tuple(rank.rank for rank, snapshot in zip(ranks, snapshots) if snapshot is None)
    if absent:
        tally.add(absent_snapshot(point, absent))
        return
    present = [snapshot for snapshot in snapshots if snapshot is not None]
    check_state(tally, point, expectation.shapes, present, asked)


def _result(rank: RankObservation, index: int) -> OperationResult | None:
    return next((result for result in rank.results if result.index == index), None)


def _snapshot(rank: RankObservation, index: int) -> Snapshot | None:
    return next((snapshot for snapshot in rank.snapshots if snapshot.index == index), None)


def require_decided(tally: Compared) -> None:
    """Demand that what passed was decided.

    Raises:
        HarnessError: Numbers are within their bound only because it admits nearly everything.
    """
    if tally.undecided:
        one = tally.undecided[0]
        raise HarnessError(f"{one.quantity}: {one.sentence}. Take fewer steps, or a smaller learning rate.")


def first(divergences: Sequence[Divergence]) -> Divergence:
    """Return the divergence to lead with: a contradiction between ranks explains the rest, then the largest excess."""

    def weight(item: Divergence) -> tuple[int, float]:
        order = {FailureKind.MISSING: 0, FailureKind.DISAGREED: 1}.get(item.kind, 2)
        excess = (item.max_error or 0.0) / (item.bound or 1e-300) if item.max_error is not None else float("inf")
        return order, -excess

    return min(divergences, key=weight)
