"""Reports what a rank itself saw that is wrong, where the numbers of the case do not show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_testing.cases.records import Case, FailureKind, Finding, RankObservation
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.oracle.quantities import Expectation


@dataclass(frozen=True, slots=True)
class Remark:
    """Something wrong.

    Attributes:
        operation: In or after which operation.
        quantity: What is wrong, in two or three words.
        statement: What is wrong with it.
    """

    operation: int
    quantity: str
    statement: str


@dataclass(frozen=True, slots=True)
class RemarkedObservation(RankObservation):
    """What a rank reports that looked for itself."""

    remarks: tuple[Remark, ...] = ()


def review(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the earliest remark of any rank as a finding."""
    found = [(remark.operation, rank.rank, remark) for rank in ranks for remark in getattr(rank, "remarks", ())]
    if not found:
        return None
    _, rank, remark = min(found, key=lambda entry: entry[:2])
    statement = f"{remark.statement}, on rank {rank}"
    return finding(case, FailureKind.DIVERGED, remark.quantity, remark.operation, statement, ranks=(rank,))
