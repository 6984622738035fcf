"""Compares a run on N ranks with what one process gives, and the ranks with one another.

Compares point by point in the order of the program and stops after the first point at which anything diverges: what
follows is a consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_testing.cases.records import Case, FailureKind, Finding, RankObservation
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.checkers.divergence import Compared, Divergence
from fsdp_testing.judging.checkers.explain import finding_of
from fsdp_testing.judging.checkers.snapshots import StateCheck, check_results
from fsdp_testing.oracle.quantities import Comparison, Expectation, ExpectedPoint, Quantity


def compare(expectation: Expectation, ranks: Sequence[RankObservation], comparison: Comparison) -> Compared:
    """Compare all ranks' observations with what the oracle expects.

    Returns:
        The divergences of the first point that has any, and how much was compared on the way. An exception on a rank
        is not a divergence here: comparison ends before the operation that raised.
    """
    tally = Compared()
    last = min((rank.error.index for rank in ranks if rank.error is not None), default=None)
    for point in expectation.points:
        # Ranks stopped in the operation that raised: after it each is at a different place.
        if last is not None and point.index >= last:
            break
        _check_point(tally, point, expectation, ranks, comparison)
        # Later divergences are consequences: everything later was computed from this.
        if tally.divergences:
            break
    return tally


def _check_point(
    tally: Compared,
    point: ExpectedPoint,
    expectation: Expectation,
    ranks: Sequence[RankObservation],
    comparison: Comparison,
) -> None:
    index = point.index
    if not point.snapshot:
        if comparison.outputs:
            results = [next((reported for reported in rank.results if reported.index == index), None) for rank in ranks]
            check_results(tally, point, results)
        return
    snapshots = [next((reported for reported in rank.snapshots if reported.index == index), None) for rank in ranks]
    absent = tuple(rank.rank for rank, snapshot in zip(ranks, snapshots) if snapshot is None)
    if absent:
        state = Quantity("result", "state")
        tally.add(Divergence(FailureKind.MISSING, state, index, absent, "was not reported"))
        return
    present = [snapshot for snapshot in snapshots if snapshot is not None]
    StateCheck(tally, point, expectation.shapes, present, comparison).run()


def review(
    case: Case, expectation: Expectation, ranks: Sequence[RankObservation], comparison: Comparison, about: str
) -> tuple[Finding | None, Compared]:
    """Compare ranks' reports on something other than the case itself.

    Args:
        case: The case.
        expectation: The expected value.
        ranks: What it is.
        comparison: The kinds that are compared.
        about: The subject, with which the sentence of a finding begins.

    Returns:
        The finding that leads, if anything diverges, and what was compared.

    Raises:
        HarnessError: A comparison passes but decides nothing.
    """
    tally = compare(expectation, ranks, comparison)
    if not tally.divergences:
        require_decided(tally)
        return None, tally
    finding = finding_of(case, first(tally.divergences), tally.divergences)
    return replace(finding, explanation=f"{about}: {finding.explanation}"), tally


def agrees(expectation: Expectation, ranks: Sequence[RankObservation], comparison: Comparison) -> bool:
    """Return whether anything was compared, and everything certainly agrees."""
    tally = compare(expectation, ranks, comparison)
    return tally.comparisons > 0 and not tally.divergences and not tally.undecided


def require_decided(tally: Compared) -> None:
    """Demand that every passed comparison decides something.

    Raises:
        HarnessError: Numbers are within their bound only because it admits nearly everything.
    """
    if tally.undecided:
        divergence = tally.undecided[0]
        raise HarnessError(
            f"{divergence.quantity}: {divergence.sentence}. Take fewer steps, or a smaller learning rate."
        )


def first(divergences: Sequence[Divergence]) -> Divergence:
    """Return the divergence to lead with: a contradiction between ranks explains the rest, then the largest excess."""

    def weight(item: Divergence) -> tuple[int, float]:
        order = {FailureKind.MISSING: 0, FailureKind.DISAGREED: 1}.get(item.kind, 2)
        excess = (item.max_error or 0.0) / (item.bound or 1e-300) if item.max_error is not None else float("inf")
        return order, -excess

    return min(divergences, key=weight)
