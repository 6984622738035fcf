"""Which operations does a failure need? Others are left out while the failure looks the same.

Over the operations alone: model, wrapping and world stay what the check chose, so that the account remains about that
check. The fuzzer's own shrinking goes further, and may end on another model. Deleting any operation leaves a legal case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import Case, Finding, Operation
from fsdp_testing.explain.shrinking.ddmin import BudgetSpent, Search
from fsdp_testing.judging.signature import signature_of

SECONDS = 10.0
"""For all failures of one implementation."""

RUNS_PER_SECOND = 20
"""Of an idle machine, roughly: a second of a budget is so many runs, so that a busy machine finds the same causes, later."""

RUNS_OF_ONE = 40
"""Programs run to shorten one failure."""

RUNS_OF_A_HANG = 100
"""What a rank that hangs is counted as: it costs a world and a deadline."""

NOT_EXAMINED = "not examined (time)"
"""What is said of a failure that the budget did not reach."""


class Budget:
    """Runs that are left: programs that ranks or the oracle are asked to run.

    Runs are counted, not seconds: on a busy machine the same failures are explained, with the same schedules.

    Args:
        runs: How many.
        whole: The budget of which this one is a part; where that is used up, so is this.
    """

    def __init__(self, runs: int, whole: Budget | None = None) -> None:
        self._start = time.monotonic()
        self._allowed = runs
        self._whole = whole
        self.runs = 0

    @classmethod
    def of_seconds(cls, seconds: float) -> Budget:
        """A budget of what an idle machine runs in so many seconds."""
        return cls(math.ceil(seconds * RUNS_PER_SECOND))

    def part(self, runs: int = RUNS_OF_ONE) -> Budget:
        """A budget for one failure out of this one; whoever runs programs counts them here as well."""
        return Budget(runs, self)

    def count(self, runs: int = 1) -> None:
        """Count runs that were made, whether or not they are allowed."""
        self.runs += runs

    def spend(self) -> None:
        """Take one run; raise `BudgetSpent` when nothing is left."""
        if self.exhausted:
            raise BudgetSpent
        self.runs += 1

    @property
    def exhausted(self) -> bool:
        """Whether it, or the whole of which it is a part, is used up."""
        return self.runs >= self._allowed or (self._whole is not None and self._whole.exhausted)

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._start


Judge = Callable[[Case], Finding | None]
"""Runs a case and returns how it fails, or None if it does not (or nothing is known of it)."""


@dataclass(frozen=True, slots=True)
class Shortest:
    """The finding on the shortest schedule found; `complete` if each operation that is left is needed."""

    finding: Finding
    complete: bool


def shorten(finding: Finding, judge: Judge, budget: Budget) -> Shortest:
    """Return the finding on the shortest schedule that shows it.

    Args:
        finding: The failure as the check found it.
        judge: Runs a case.
        budget: Runs; when they are used up, the shortest so far is returned.
    """
    best = finding

    def keeping(batch: list[Case]) -> list[Case]:
        nonlocal best
        budget.spend()
        found = judge(batch[0])
        if found is None or signature_of(found) != signature_of(finding):
            return []
        best = found
        return batch

    def search_all() -> None:
        while search.take_first(_shorter(best)):
            pass

    search = Search(finding.case, keeping)
    complete = search.run(search_all)
    return Shortest(best, complete)


def _shorter(finding: Finding) -> Iterator[Case]:
    """Yield shorter programs, boldest first: nothing after the failure, then without halves, quarters, ... of it."""
    case, program = finding.case, finding.case.program
    if finding.operation + 1 < len(program):
        yield replace(case, program=program[: max(finding.operation, 0) + 1])
    size = max(len(program) // 2, 1)
    while size:
        for start in range(len(program) - size, -1, -size):
            yield replace(case, program=program[:start] + program[start + size :])
        size //= 2


def with_schedule(case: Case, known: Sequence[Operation]) -> Iterator[Case]:
    """Yield `case` with only those of its operations that make up a known schedule, as far as it has them.

    First with the very same operations, then with operations of the same kinds. Of several that fit the last are taken.
    """
    kinds = [wanted.shape() for wanted in known]
    same = _picked(case, known, lambda operation: operation)
    alike = _picked(case, kinds, lambda operation: operation.shape())
    yield from (replace(case, program=program) for program in dict.fromkeys((same, alike)) if program)


def _picked(case: Case, wanted: Sequence[object], seen_as: Callable[[Operation], object]) -> tuple[Operation, ...]:
    chosen: list[Operation] = []
    place = len(case.program)
    for item in reversed(wanted):
        place = next((index for index in range(place - 1, -1, -1) if seen_as(case.program[index]) == item), -1)
        if place < 0:
            return ()
        chosen.append(case.program[place])
    return tuple(reversed(chosen))
