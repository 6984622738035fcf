"""Checks that a deep copy computes what the original computes, or is refused on every rank alike. Pure.

The copy runs the micro-batch that the original runs next, from the same values, so that the oracle's numbers for the
original hold for the copy as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_testing.cases.records import Case, FailureKind, Finding, OperationResult, RankObservation, Snapshot
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.explain import finding, ranks_text
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.quantities import Expectation


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of the copy on one rank.

    Attributes:
        refused: The error that refused it; empty if there is a copy.
        results: Loss and outputs of its micro-batch.
        snapshot: Its parameters and gradients afterwards.
    """

    refused: str
    results: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class CopyingObservation(RankObservation):
    """What a rank reports that also copied its model."""

    copied: Copied | None = None


def review_copies(
    case: Case, ranks: Sequence[RankObservation], expectation: Expectation, *, may_refuse: bool = True
) -> Finding | None:
    """Compare the copies with what the oracle expects of the original's next micro-batch.

    Args:
        case: What was run.
        ranks: What each rank reports.
        expectation: The oracle's.
        may_refuse: Every rank may refuse the copy instead.
    """
    copies = [rank.copied if isinstance(rank, CopyingObservation) else None for rank in ranks]
    missing = tuple(rank for rank, copy in enumerate(copies) if copy is None)
    if missing:
        return _finding(case, missing, "nothing was copied")
    refused = tuple(rank for rank, copy in enumerate(copies) if copy is not None and copy.refused)
    if refused:
        if may_refuse and len(refused) == len(ranks):
            return None
        first = copies[refused[0]]
        some = " on some ranks only" if len(refused) < len(ranks) else ""
        return _finding(case, refused, f"was refused{some}: {first.refused if first else ''}")
    # Results of the micro-batch after the copy, and the state that follows it; here they are the copy's own.
    at = _copied_at(case)
    after = [point for point in expectation.points if point.index > at]
    result, state = (replace(next(p for p in after if p.snapshot is kind), index=at) for kind in (False, True))
    observations = [
        RankObservation(
            rank,
            (OperationResult(at, dict(copy.results)),),
            (replace(copy.snapshot, index=at),) if copy.snapshot is not None else (),
        )
        for rank, copy in enumerate(copies)
        if copy is not None
    ]
    due = replace(expectation, points=(result, state))
    return agreement.review(case, due, observations, Comparison(optimizer=False), "the deep copy")[0]


def _copied_at(case: Case) -> int:
    return next(index for index, operation in enumerate(case.program) if getattr(operation, "label", "") == "deepcopy")


def _finding(case: Case, ranks: tuple[int, ...], sentence: str) -> Finding:
    index, statement = _copied_at(case), f"the deep copy {sentence}, on {ranks_text(ranks)}"
    explanation = f"after operation {index}: {statement}"
    return finding(case, FailureKind.DIVERGED, "deep copy", index, statement, explanation, ranks=ranks)
