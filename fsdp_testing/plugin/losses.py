"""Refuses to expect the loss of a rank: a death or a hang is not the failure that a test's mark announces."""

from __future__ import annotations

import pytest

from fsdp_testing.errors import WorldFailed
from fsdp_testing.ranks.pool.outcome import Fate, WorldOutcome


def was_lost(error: BaseException) -> bool:
    """Return whether an error says that a process died or hung, which no test may expect as its failure."""
    outcome = error.outcome if isinstance(error, WorldFailed) else None
    return isinstance(outcome, WorldOutcome) and any(rank.fate in (Fate.DIED, Fate.HUNG) for rank in outcome.ranks)


def failed_if_lost(report: pytest.TestReport, error: BaseException) -> pytest.TestReport:
    """Return the report of a phase that ended with an error: a failure if a process was lost, even in a marked test."""
    if was_lost(error) and report.outcome != "failed":
        report.outcome = "failed"
        report.longrepr = report.longrepr or str(error)
        vars(report).pop("wasxfail", None)
    return report
