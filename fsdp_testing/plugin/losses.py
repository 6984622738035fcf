"""No test may expect to lose a rank: a death or a hang proves nothing of what the test was marked for."""

from __future__ import annotations

import pytest

from fsdp_testing.errors import WorldFailed
from fsdp_testing.ranks.pool.outcome import Fate, WorldOutcome


def was_lost(error: BaseException) -> bool:
    """Return whether an error says that a process died or hung: no test may expect that as its failure."""
    outcome = error.outcome if isinstance(error, WorldFailed) else None
    return isinstance(outcome, WorldOutcome) and any(rank.fate in (Fate.DIED, Fate.HUNG) for rank in outcome.ranks)


def failed_if_lost(report: pytest.TestReport, error: BaseException) -> pytest.TestReport:
    """Return the report of a phase that ended with an error: a failure if a process was lost, whatever the test's mark says."""
    if was_lost(error) and report.outcome != "failed":
        report.outcome = "failed"
        report.longrepr = report.longrepr or str(error)
        vars(report).pop("wasxfail", None)
    return report
