"""What a check may say, and how several verdicts become one.

The core is three-valued: a claim holds (`PASS`), is refuted (`FAIL`), or nothing is known (`UNKNOWN`: the check
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
        """Whether nothing here should stop a user: exit code 0 needs this of every verdict."""
        return self not in (Verdict.FAIL, Verdict.UNKNOWN)


# Strongest first. One refuting case refutes the claim whatever the others say; a case of which nothing is known forbids
# to say that the claim holds; cases that were not asked say nothing.
_MERGE_ORDER = (
    Verdict.FAIL,
    Verdict.UNKNOWN,
    Verdict.STALE,
    Verdict.EXPECTED_FAILURE,
    Verdict.PASS,
    Verdict.NOT_CLAIMED,
)


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the one verdict of several cases; of none at all it is `UNKNOWN`, for nothing was shown."""
    found = set(verdicts)
    return next((verdict for verdict in _MERGE_ORDER if verdict in found), Verdict.UNKNOWN)


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return the documented exit code: 0 all hold, 1 one failed, 3 one is unknown (and none failed)."""
    merged = merge([*verdicts, Verdict.NOT_CLAIMED])
    return {Verdict.FAIL: 1, Verdict.UNKNOWN: 3}.get(merged, 0)
