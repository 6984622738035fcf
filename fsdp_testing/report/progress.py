"""What does a person see while a run goes on? One moving line in a terminal, a line for each suite or stage in a log file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_testing.cases.records import CheckResult, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.terminal import STYLES, plain

# Printed the moment they are known; everything else waits for the table.
AT_ONCE = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE)


@dataclass(slots=True)
class _Suite:
    """How far one suite of one implementation is."""

    started: int = 0
    results: list[CheckResult] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        counts = {verdict: sum(result.verdict is verdict for result in self.results) for verdict in Verdict}
        found = ", ".join(f"{count} {summary.WORDS[verdict]}" for verdict, count in counts.items() if count)
        return f"{found} ({sum(result.seconds for result in self.results):.1f} s)"


class ProgressListener:
    """A `RunListener` that draws progress with rich; as a context manager it leaves the terminal as it was.

    In a terminal one line moves: what runs now, how much is done, what was found so far. Elsewhere nothing moves: the
    first line comes before anything is run, then one for each suite of each implementation when it is through, with
    its counts, its time, and how much of the whole is done. A failed, unknown or stale result is a line at once.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._moving = console.is_terminal
        self._begun = time.monotonic()
        self._open: dict[tuple[str, str], _Suite] = {}
        self._total = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._moving,
        )
        self._task: TaskID = self._progress.add_task("starting ranks", total=None)
        self.results: list[CheckResult] = []

    def __enter__(self) -> ProgressListener:
        self._progress.start()
        self._log("starting ranks and examining the adapters")
        return self

    def __exit__(self, *_: object) -> None:
        self._close_suites()
        self._progress.stop()

    def planned(self, total: int) -> None:
        """Set the length of the bar."""
        self._total = total
        self._progress.update(self._task, total=total)
        self._log(f"{summary.checks(total)} to run; a line for each suite that is through")

    def started(self, implementation: str, check: str) -> None:
        """Show what runs now."""
        now = (implementation, summary.suite_of(check))
        self._open.setdefault(now, _Suite()).started += 1
        self._close_suites(but=now)
        totals = {verdict: sum(result.verdict is verdict for result in self.results) for verdict in AT_ONCE}
        found = ", ".join(f"{count} {summary.WORDS[verdict]}" for verdict, count in totals.items() if count)
        self._progress.update(self._task, description=f"{implementation} {check}{f' ({found})' if found else ''}")

    def finished(self, result: CheckResult) -> None:
        """Keep it, count it, and print trouble at once."""
        self.results.append(result)
        self._open.setdefault((result.implementation, summary.suite_of(result.check)), _Suite()).results.append(result)
        self._progress.advance(self._task)
        if result.verdict in AT_ONCE:
            word = (summary.WORDS[result.verdict], STYLES[result.verdict])
            line = Text.assemble(word, plain(f" {result.implementation} {result.check}: {summary.sentence(result)}"))
            self._console.print(line, soft_wrap=not self._moving)
        if len(self.results) == self._total:
            self._close_suites()
            failed = sum(bool(result.findings) for result in self.results)
            if failed:
                self._progress.update(self._task, description="looking for causes")
                self._log(f"looking for the causes of what failed ({summary.checks(failed)})")

    def _close_suites(self, but: tuple[str, str] | None = None) -> None:
        """Print each suite of which nothing runs any more; `but` has only begun."""
        for key, suite in list(self._open.items()):
            if key != but and (but is None or len(suite.results) >= suite.started):
                del self._open[key]
                # Of what nothing was asked nothing is said; it is counted at the end.
                if any(result.verdict is not Verdict.NOT_CLAIMED for result in suite.results):
                    done = f"{len(self.results)} of {self._total}" if self._total else f"{len(self.results)}"
                    self._log(f"{key[0]} {key[1]}: {suite.sentence}; {done} checks")

    def _log(self, line: str) -> None:
        if not self._moving:
            elapsed = f"{time.monotonic() - self._begun:6.1f} s  "
            self._console.print(plain(elapsed + line), soft_wrap=True)


class StageProgress:
    """Shows which stage of a long work is under way; as a context manager it leaves the terminal as it was.

    In a terminal one line moves, with the stage and the time since the beginning. Elsewhere each stage is a line when it begins.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting ranks", total=None)

    def __enter__(self) -> StageProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, what: str) -> None:
        """Show that a stage begins."""
        self._progress.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(plain(f"{time.monotonic() - self._begun:6.1f} s  {what}"), soft_wrap=True)
