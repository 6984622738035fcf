"""Fixtures of all tests: pytest in a subprocess, with this project's plugin, whatever the outer run measures.

Where GitHub runs them, the slowest tests are written into the summary of the job.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(slowest([report for report in reports if isinstance(report, pytest.TestReport)]))


def slowest(reports: list[pytest.TestReport]) -> str:
    """A table of the slowest tests, setup and teardown included."""
    from slowest import table

    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a Counter of seconds
    return "\n".join([*table(seconds), ""])
