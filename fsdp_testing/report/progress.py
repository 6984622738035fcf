"""What does a person see while a run goes on? One moving line in a terminal, one line per trouble in a log file."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_testing.records import CheckResult, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.terminal import STYLES, plain

# Printed the moment they are known; everything else waits for the table.
AT_ONCE = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE)


class ProgressListener:
    """A `RunListener` that draws progress with rich; as a context manager it leaves the terminal as it was.

    In a terminal one line moves: what runs now, how much is done, what was found so far. Elsewhere nothing moves; each
    failed, unknown or stale result is one line, and each implementation one when it is through.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._moving = console.is_terminal
        self._counts: dict[str, dict[Verdict, int]] = {}
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
        self._current = ""
        self.results: list[CheckResult] = []

    def __enter__(self) -> ProgressListener:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print_counts(self._current)
        self._progress.stop()

    def planned(self, total: int) -> None:
        """Set the length of the bar."""
        self._progress.update(self._task, total=total)

    def started(self, implementation: str, check: str) -> None:
        """Show what runs now."""
        if implementation != self._current:
            self._print_counts(self._current)
            self._current = implementation
        totals = {v: sum(counts[v] for counts in self._counts.values()) for v in AT_ONCE}
        found = f" ({_words(totals)})" if any(totals.values()) else ""
        self._progress.update(self._task, description=f"{implementation} {check}{found}")

    def finished(self, result: CheckResult) -> None:
        """Keep it, count it, and print trouble at once."""
        self.results.append(result)
        counts = self._counts.setdefault(result.implementation, dict.fromkeys(Verdict, 0))
        counts[result.verdict] += 1
        self._progress.advance(self._task)
        if result.verdict in AT_ONCE:
            word = (summary.WORDS[result.verdict], STYLES[result.verdict])
            line = Text.assemble(word, plain(f" {result.implementation} {result.check}: {summary.sentence(result)}"))
            self._console.print(line, soft_wrap=not self._moving)

    def _print_counts(self, implementation: str) -> None:
        counts = self._counts.get(implementation)
        if counts is not None and not self._moving:
            self._console.print(f"{implementation}: {_words(counts)}", soft_wrap=True)


def _words(counts: dict[Verdict, int]) -> str:
    return ", ".join(f"{count} {summary.WORDS[verdict]}" for verdict, count in counts.items() if count)
