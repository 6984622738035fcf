"""The progress of a command: one moving line in a terminal, lines in a log file."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_testing.cases.records import CheckResult, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.sheet import numbered
from fsdp_testing.report.terminal import STYLES, Output, plain

# Printed immediately; everything else waits for the table.
AT_ONCE = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE)
LOG_SECONDS = 30.0
"""Seconds between two lines of a long stage in a log file."""
ESTIMATE_SECONDS = 3.0
"""Seconds after which a stage shows its remaining time."""


class Display:
    """The stages of a command, and how far each is; as a context manager it leaves the terminal as it was.

    In a terminal one line moves: the stage, how much is done, what was found so far. Elsewhere a stage prints a line when it
    begins, and its progress every `LOG_SECONDS`.

    Args:
        console: The console to write to.
        unit: The name of what is counted, in the plural.
    """

    def __init__(self, console: Output, unit: str = "") -> None:
        self.console = console
        self._unit = unit
        self._begun = self._told = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(30), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID = self._progress.add_task("starting ranks", total=None)
        self._stage, self._stage_begun, self._estimated = "", self._begun, False
        self._done_before: int | None = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Show that a stage begins, of `total` units if that is known."""
        self._stage, self._stage_begun, self._estimated, self._done_before = name, time.monotonic(), False, None
        self._progress.reset(self._task, description=name, total=total)
        self.log(name)

    def at(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show how much of the stage is done, of how much, and what was found so far."""
        far = f"{done:,}{f' of {total:,}' if total else ''} {self._unit}".rstrip()
        rest = self._rest(done, total)
        text = ", ".join(filter(None, (far, note, rest)))
        self._progress.update(self._task, completed=done, total=total, description=f"{self._stage}: {text}")
        if time.monotonic() - self._told >= LOG_SECONDS or (rest and not self._estimated):
            self._estimated = bool(rest)
            self.log(text)

    def _rest(self, done: int, total: int | None) -> str:
        """Return the remaining time of the stage, at its pace so far; empty if unknown."""
        if self._done_before is None:
            self._done_before = done
        here, seconds = done - self._done_before, time.monotonic() - self._stage_begun
        if total is None or here <= 0 or done >= total or seconds < ESTIMATE_SECONDS:
            return ""
        left = (total - done) * seconds / here
        return f"about {left:.0f} s left" if left < 90 else f"about {left / 60:.0f} min left"

    def now(self, text: str) -> None:
        """Show the current activity; not written to a log file."""
        self._progress.update(self._task, description=text)

    def log(self, line: str) -> None:
        """Write a line with the time since the beginning into a log file."""
        self._told = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(plain(f"{self._told - self._begun:6.1f} s  {line}"), soft_wrap=True)


@dataclass(slots=True)
class _Suite:
    """The progress of one suite of one implementation."""

    started: int = 0
    results: list[CheckResult] = field(default_factory=list)


class ProgressListener(Display):
    """A `RunListener`: prints a line for each finished suite of each implementation, and trouble at once."""

    def __init__(self, console: Output) -> None:
        super().__init__(console, "checks")
        self._open: dict[tuple[str, str], _Suite] = {}
        self._total = 0
        self.results: list[CheckResult] = []

    def __enter__(self) -> ProgressListener:
        super().__enter__()
        self.stage("starting ranks and examining the adapters")
        return self

    def __exit__(self, *_: object) -> None:
        self._close_suites()
        super().__exit__(*_)

    def planned(self, total: int) -> None:
        """Set how many checks there are."""
        self._total = total
        self.stage(f"{numbered(total, 'check')} to run; a line for each finished suite", total)

    def started(self, implementation: str, check: str) -> None:
        """Show what runs now."""
        suite = (implementation, summary.suite_of(check))
        self._open.setdefault(suite, _Suite()).started += 1
        self._close_suites(but=suite)
        trouble = _counts([result for result in self.results if result.verdict in AT_ONCE])
        self.now(f"{len(self.results)} of {self._total} {implementation} {check}{f' ({trouble})' if trouble else ''}")

    def finished(self, result: CheckResult) -> None:
        """Keep and count the result, and print trouble at once."""
        self.results.append(result)
        self._open.setdefault((result.implementation, summary.suite_of(result.check)), _Suite()).results.append(result)
        self._progress.update(self._task, completed=len(self.results), total=self._total or None)
        if result.verdict in AT_ONCE:
            word = (summary.WORDS[result.verdict], STYLES[result.verdict.value])
            line = Text.assemble(word, plain(f" {result.implementation} {result.check}: {summary.sentence(result)}"))
            self.console.print(line, soft_wrap=not self.console.is_terminal)
        if len(self.results) == self._total:
            self._close_suites()
            failed = sum(bool(result.findings) for result in self.results)
            if failed:
                self.stage(f"looking for the causes of what failed ({numbered(failed, 'check')})")

    def _close_suites(self, but: tuple[str, str] | None = None) -> None:
        """Print each suite that has finished; `but` has only begun."""
        for key, suite in list(self._open.items()):
            if key != but and (but is None or len(suite.results) >= suite.started):
                del self._open[key]
                # A suite without a claimed check gets no line; it is counted at the end.
                if any(result.verdict is not Verdict.NOT_CLAIMED for result in suite.results):
                    done = f"{len(self.results)} of {self._total}" if self._total else f"{len(self.results)}"
                    seconds = sum(result.seconds for result in suite.results)
                    self.log(f"{key[0]} {key[1]}: {_counts(suite.results)} ({seconds:.1f} s); {done} checks")


def _counts(results: list[CheckResult]) -> str:
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {summary.WORDS[verdict]}" for verdict in Verdict if counts[verdict])
