"""The verdicts of a check, how several become one, and the kinds of failure: one list for every report and rule.

The core is three-valued: a claim holds (`PASS`), is refuted (`FAIL`), or has no verdict (`UNKNOWN`: the check
crashed, the pool was lost, an adapter misbehaved). `NOT_CLAIMED` means that nothing was asked, because the
implementation does not claim the capability. `EXPECTED_FAILURE` and `STALE` exist only after a user's list of
expected failures was applied.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.Enum):
    """Outcome of one check on one implementation."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_CLAIMED = "not_claimed"
    EXPECTED_FAILURE = "expected_failure"
    STALE = "stale"

    @property
    def holds(self) -> bool:
        """Whether this verdict allows exit code 0."""
        return self not in (Verdict.FAIL, Verdict.UNKNOWN)


# Strongest first. One refuting case refutes the claim whatever the others say; one case without a verdict prevents a
# pass; unclaimed cases do not count.
_MERGE_ORDER = (
    Verdict.FAIL,
    Verdict.UNKNOWN,
    Verdict.STALE,
    Verdict.EXPECTED_FAILURE,
    Verdict.PASS,
    Verdict.NOT_CLAIMED,
)


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the one verdict of several cases; without any case `UNKNOWN`, since nothing was shown."""
    found = set(verdicts)
    return next((verdict for verdict in _MERGE_ORDER if verdict in found), Verdict.UNKNOWN)


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return the documented exit code: 0 all hold, 1 one failed, 3 one is unknown (and none failed)."""
    merged = merge([*verdicts, Verdict.NOT_CLAIMED])
    return {Verdict.FAIL: 1, Verdict.UNKNOWN: 3}.get(merged, 0)


_FORMER = {"desynchronised": "uncoordinated"}


class FailureKind(enum.StrEnum):
    """Kind of failure; documents of earlier versions may call `uncoordinated` `desynchronised`."""

    DIVERGED = "diverged"
    """Numbers differ from the oracle's."""
    DISAGREED = "disagreed"
    """Ranks contradict one another."""
    MISSING = "missing"
    """A rank did not report the quantity, or no rank has it."""
    RAISED = "raised"
    """Every rank raised."""
    ONE_RAISED = "one_raised"
    """Some ranks raised; the others went on or waited."""
    UNCOORDINATED = "uncoordinated"
    """Ranks issued different collectives, or events in an order that sharding forbids."""
    RACE = "race"
    """Two uses of memory on different streams are unordered."""
    KEPT = "kept"
    """Full parameters stay in memory that must be freed."""
    EXCESS = "excess"
    """More is communicated than the strategy needs."""
    LEAKED = "leaked"
    """State of the process, or the model, outlives the case."""
    DIED = "died"
    """A process ended."""
    HUNG = "hung"
    """A process did not finish in time."""

    @classmethod
    def _missing_(cls, value: object) -> FailureKind | None:
        return cls(_FORMER[value]) if isinstance(value, str) and value in _FORMER else None


RAISES = frozenset({FailureKind.RAISED, FailureKind.ONE_RAISED})
"""Exceptions, on all ranks or on some."""

LOSES_RANKS = frozenset({FailureKind.DIED, FailureKind.HUNG})
"""Failures that cost a process; an overloaded machine can also cause one."""

ENDS_RANKS = LOSES_RANKS | {FailureKind.ONE_RAISED, FailureKind.UNCOORDINATED}
"""Failures after which the ranks cannot continue together."""


class Mismatch(enum.StrEnum):
    """How a quantity differs from the expected one."""

    NUMBERS = "is off"
    NONE = "is None"
    NOT_NONE = "holds numbers"
    DTYPE = "has another dtype"
    SHAPE = "has another shape"
    REQUIRES_GRAD = "has another requires_grad"
    STRUCTURE = "has another structure"
