"""Finds the simplest case that still fails in the same way (`shrink`), or the shortest schedule alone (`shorten`).

For the fuzzer everything may become simpler: first much simpler cases are asked outright (`reductions`), then parts
of what is left go (`ddmin`). A failure that costs the ranks is met as rarely as possible: the boldest candidate first, one
after the other, up to the first that keeps the signature. What passes costs nothing there.

For a check only operations are left out: model, wrapping and world stay what the check chose, so that the account remains
about that check. Deleting any operation leaves a legal case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import ENDS_RANKS, Case, FailureKind, Finding, Operation
from fsdp_testing.explain.shrinking import reductions
from fsdp_testing.explain.shrinking.ddmin import BudgetSpent, Kind, Search
from fsdp_testing.judging.signature import Signature, signature_of

SECONDS = 20.0
PATIENCE = 10
"""On a busy machine shrinking takes at most this many times its seconds."""

_AT_ONCE = 12
KINDS: tuple[Kind, ...] = (
    reductions.deletions,
    reductions.pairs,
    reductions.settings,
    reductions.cuts,
    reductions.trees,
    reductions.operations,
)
"""The ways to simplify a case, in the order in which they are tried."""

Attempt = Callable[[Sequence[Case], Signature], Sequence[tuple[Case, Signature | None]]]
"""Runs cases of one world size, with a snapshot after every operation, and returns how each fails.

Where the signature that is looked for costs the ranks, what comes after the first case that has it may be left out."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of shrinking.

    Attributes:
        case: The simplest case found.
        attempts: Number of cases run.
        seconds: Time taken.
        complete: No reduction is left that keeps the signature; else the budget was used up.
    """

    case: Case
    attempts: int
    seconds: float
    complete: bool


def shrink(
    case: Case,
    signature: Signature,
    attempt: Attempt,
    shape: Callable[[Case], Case],
    fair: Callable[[Case], bool],
    seconds: float = SECONDS,
) -> Shrunk:
    """Return the simplest case found that fails with `signature`, as `case` does.

    Args:
        case: The case to begin with.
        signature: The signature of the failure.
        attempt: Runs candidates.
        shape: Gives the legal case nearest to a reduced one.
        fair: Whether an implementation may be asked a case at all.
        seconds: Time limit on an idle machine; a busy machine takes at most `PATIENCE` times as long.
    """
    budget = Budget.of_seconds(seconds)
    attempts = 0

    def keeping(batch: list[Case]) -> list[Case]:
        nonlocal attempts
        if batch and (budget.exhausted or budget.seconds >= PATIENCE * seconds):
            raise BudgetSpent
        failing: list[Case] = []
        for size in sorted({case.world.size for case in batch}):
            results = attempt([case for case in batch if case.world.size == size], signature)
            attempts += len(results)
            budget.count(sum(1 + _COSTS.get(result.kind, 0) if result else 1 for _, result in results))
            failing += [case for case, result in results if result == signature]
        return [case for case in batch if case in failing]

    search = Search(case, keeping, _AT_ONCE, shape, fair)
    complete = search.run(lambda: _simplify(search, signature))
    return Shrunk(search.case, attempts, budget.seconds, complete)


def _simplify(search: Search, signature: Signature) -> None:
    """Take candidates until nothing simpler keeps the signature."""
    costly = signature.kind in ENDS_RANKS
    search.take_first(reductions.on_small_models(search.case))
    if costly:
        search.take_first(reductions.minimal_programs_of_beginnings(search.case, signature))
        search.take_first([reductions.simplest(search.case)])
    search.take_first(reductions.beginnings(search.case, signature))
    search.take_first(reductions.minimal_programs(search.case))
    before = None
    while before != search.case:
        before = search.case
        for kind in KINDS:
            while search.take_parts(kind, boldly=costly):
                pass


# ------------------------------------------------------------------------------------------------ schedules

EXPLAIN_SECONDS = 10.0
"""For all failures of one implementation."""

RUNS_PER_SECOND = 20
"""Of an idle machine, roughly: a second of a budget is so many runs, so that a busy machine finds the same causes, later."""

RUNS_OF_ONE = 40
"""Programs run to shorten one failure."""

RUNS_OF_A_HANG = 100
"""Number of runs that a hang counts as: it costs a world and a deadline."""

_COSTS = {**dict.fromkeys(ENDS_RANKS, 10), FailureKind.HUNG: RUNS_OF_A_HANG}
"""Extra runs that a failure counts as if it kills its ranks."""

NOT_EXAMINED = "not examined (time)"
"""The remark on a failure that the budget did not reach."""


class Budget:
    """Runs that are left: programs that ranks or the oracle are asked to run.

    Runs are counted, not seconds: on a busy machine the same failures are explained, with the same schedules.

    Args:
        runs: How many.
        whole: The budget that this one is a part of; if the whole is used up, so is this part.
    """

    def __init__(self, runs: int, whole: Budget | None = None) -> None:
        self._start = time.monotonic()
        self._allowed = runs
        self._whole = whole
        self.runs = 0

    @classmethod
    def of_seconds(cls, seconds: float) -> Budget:
        """A budget of the runs that an idle machine makes in this many seconds."""
        return cls(math.ceil(seconds * RUNS_PER_SECOND))

    def part(self, runs: int = RUNS_OF_ONE) -> Budget:
        """A part of this budget for one failure; its runs count here as well."""
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
        """Whether this budget, or the whole that it is part of, is used up."""
        return self.runs >= self._allowed or (self._whole is not None and self._whole.exhausted)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start


def shorten(finding: Finding, judge: Callable[[Case], Finding | None], budget: Budget) -> tuple[Finding, bool]:
    """Return the finding on the shortest schedule that shows it, and whether each operation that is left is needed.

    Args:
        finding: The failure as the check found it.
        judge: Runs a case and returns how it fails, or None if it does not (or nothing is known of it).
        budget: Runs; when they are used up, the shortest so far is returned.
    """
    best = finding

    def keeping(batch: list[Case]) -> list[Case]:
        nonlocal best
        budget.spend()
        result = judge(batch[0])
        if result is None or signature_of(result) != signature_of(finding):
            return []
        best = result
        return batch

    def search_all() -> None:
        while search.take_first(_shorter(best)):
            pass

    search = Search(finding.case, keeping)
    complete = search.run(search_all)
    return best, complete


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


def with_schedule(case: Case, schedule: Sequence[Operation]) -> Iterator[Case]:
    """Yield `case` with only the operations of a known schedule, as far as it has them.

    First with the very same operations, then with operations of the same kinds. Of several that fit the last are taken.
    """
    kinds = [wanted.shape() for wanted in schedule]
    same = _picked(case, schedule, lambda operation: operation)
    alike = _picked(case, kinds, lambda operation: operation.shape())
    yield from (replace(case, program=program) for program in dict.fromkeys((same, alike)) if program)


def _picked(case: Case, wanted: Sequence[object], seen_as: Callable[[Operation], object]) -> tuple[Operation, ...]:
    chosen: list[Operation] = []
    end = len(case.program)
    for item in reversed(wanted):
        end = next((index for index in range(end - 1, -1, -1) if seen_as(case.program[index]) == item), -1)
        if end < 0:
            return ()
        chosen.append(case.program[end])
    return tuple(reversed(chosen))
