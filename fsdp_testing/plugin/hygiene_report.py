"""The report of a test on ranks beside its verdict: what it leaked, warned about and wrote, and how to debug it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from fsdp_testing.base.printable import printable
from fsdp_testing.plugin.longrepr import build, text_element
from fsdp_testing.plugin.records import Phase, RankResult, WarningRecord
from fsdp_testing.plugin.selection import location_of
from fsdp_testing.ranks.pool import WorldOutcome
from fsdp_testing.ranks.pool.outcome import left_behind, rank_names


class WorldHygieneWarning(pytest.PytestWarning):
    """A test leaked state in a rank; `--strict-hygiene` makes it a failure."""


def report_teardown_failure(item: pytest.Item, text: str) -> None:
    """Report a failed teardown beside the item's own reports."""
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="teardown",
    )
    item.ihook.pytest_runtest_logreport(report=report)


def report_left_behind(item: pytest.Item, lines: list[str]) -> None:
    """Report leaks of fixtures that ended in ranks after the item, in the same way as leaks of the item."""
    strict = _warned(item, lines)
    if strict:
        report_teardown_failure(item, f"fixtures in ranks leaked state ({strict}): {'; '.join(lines)}")


def _warned(item: pytest.Item, lines: list[str]) -> str:
    """Warn about leaked state, or return the error that makes it a failure."""
    if item.config.option.strict_hygiene:
        return "--strict-hygiene"
    try:
        item.warn(WorldHygieneWarning("; ".join(lines)))
    except WorldHygieneWarning:
        return "the filter `error`"
    return ""


class HygieneReport:
    """Adds warnings, leaks, output and hints to the merged reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def add(self, item: pytest.Item, outcome: WorldOutcome, merged: list[Phase]) -> None:
        """Add warnings, dirt, output and hints of one test."""
        self._warn(item, outcome)
        self._report_dirt(item, outcome, merged)
        if self._config.getoption("capture", "no") == "no":
            self._show_output(outcome)
        if self._config.getoption("usepdb", False) and any(report.outcome == "failed" for report in merged):
            self._hint_at_rank_pdb(outcome, merged)
        self._stop_if_asked(item, outcome)

    def _report_dirt(self, item: pytest.Item, outcome: WorldOutcome, merged: list[Phase]) -> None:
        lines = left_behind(
            (rank.rank, (*rank.dirt, *(rank.value.dirt if isinstance(rank.value, RankResult) else ())))
            for rank in outcome.ranks
        )
        if not lines:
            return
        strict = _warned(item, lines)
        if strict:
            _fail(item, merged, [f"the test leaked state ({strict})", *lines])

    def _warn(self, item: pytest.Item, outcome: WorldOutcome) -> None:
        """Pass on warnings of ranks, each once."""
        told = (
            (rank.rank, rank.value.warnings if isinstance(rank.value, RankResult) else ()) for rank in outcome.ranks
        )
        for record, text in each_once(told, outcome.size):
            message = warnings.WarningMessage(UserWarning(text), category_of(record), record.filename, record.lineno)
            item.ihook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": record.when, "nodeid": item.nodeid, "location": None}
            )

    def _show_output(self, outcome: WorldOutcome) -> None:
        """Under `-s`, show the output of ranks, each line with its rank."""
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for rank in outcome.ranks:
            for line in (rank.stdout + rank.stderr).splitlines():
                reporter.write_line(f"[rank {rank.rank}] {printable(line, colours=True)}")

    def _hint_at_rank_pdb(self, outcome: WorldOutcome, merged: list[Phase]) -> None:
        ranks = [r.rank for r in outcome.ranks if not (isinstance(r.value, RankResult) and not r.value.failed)] or [0]
        text = (
            "--pdb opens the debugger in the controlling process, and this test failed in ranks. "
            f"Run it again with --rank-pdb {ranks[0]} to debug rank {ranks[0]}."
        )
        next(report for report in merged if report.outcome == "failed").sections.append(("--pdb", text))
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text)

    def _stop_if_asked(self, item: pytest.Item, outcome: WorldOutcome) -> None:
        for rank in outcome.ranks:
            if isinstance(rank.value, RankResult) and rank.value.stop:
                item.session.shouldstop = f"rank {rank.rank}: {rank.value.stop}"
            if isinstance(rank.value, RankResult) and rank.value.fail:
                item.session.shouldfail = f"rank {rank.rank}: {rank.value.fail}"
            if rank.error is not None and rank.error.type_name == "Exit":
                item.session.shouldstop = f"rank {rank.rank} called pytest.exit: {rank.error.message}"


def _fail(item: pytest.Item, merged: list[Phase], lines: list[str]) -> None:
    """Turn a passed call into a failure; add an error of teardown to any other verdict."""
    called = [report for report in merged if report.when == "call" and report.outcome == "passed"]
    target = called[0] if called and called[0].wasxfail is None else merged[-1]
    if target.outcome == "failed":
        target.sections.append(("hygiene", "\n".join(lines)))
        return
    target.fail(build([text_element(lines)], f"{lines[0]}: {lines[1]}", None, location_of(item)))


def each_once(told: Iterable[tuple[int, Iterable[WarningRecord]]], size: int) -> Iterator[tuple[WarningRecord, str]]:
    """Yield each warning of ranks once, with a text that names them unless all gave it."""
    by_rank: dict[WarningRecord, list[int]] = {}
    for rank, records in told:
        for record in records:
            ranks = by_rank.setdefault(record, [])
            if rank not in ranks:
                ranks.append(rank)
    for record, ranks in by_rank.items():
        yield record, printable(record.message) + ("" if len(ranks) == size else f" [{rank_names(ranks)}]")


def category_of(record: WarningRecord) -> type[Warning]:
    """Return the warning's class, when this process can import it."""
    try:
        found: Any = importlib.import_module(record.module)
        for part in record.category.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
