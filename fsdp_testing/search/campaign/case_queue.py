"""The order of random cases: each drawn case runs once; cases that may kill ranks come rarely, but all of them run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from fsdp_testing.cases.records import Case
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.search.loop import Budget
from fsdp_testing.search.state import Verdicts

BATCH = 24
COSTLY_ONE_IN = 20
"""While other cases wait, at most this many cases that may kill ranks are run."""
_COSTLY_AT_ONCE = 2
_VARIANTS_OF_ONE = 2


class QueuedCase(NamedTuple):
    """A case to run.

    Attributes:
        case: The case.
        number: The number from which it was drawn; None for a variant.
        depth: 0 for a drawn case; 1 for a variant of a case with a known failure, 2 for a variant of such a variant.
        origin: Number of the case of which it is a variant.
    """

    case: Case
    number: int | None = None
    depth: int = 0
    origin: int | None = None


class CaseQueue:
    """Hands out batches of cases for one world size each.

    Args:
        draw: Gives the case of a number.
        verdicts: The verdicts on drawn cases. Cases that an earlier run drew but did not finish come first.
        budget: Cases and time; the time is checked before each case.
    """

    def __init__(self, draw: Callable[[int], Case], verdicts: Verdicts, budget: Budget) -> None:
        self._draw = draw
        self._verdicts = verdicts
        self._budget = budget
        self._resumed = deque(verdicts.numbers(None))
        self._postponed: deque[int] = deque()
        self._waiting: dict[int, list[QueuedCase]] = {}
        self._costly: dict[int, list[QueuedCase]] = {}
        self._others = 0
        self._in_a_row = 0
        self.postponed: Counter[str] = Counter()

    def add_variant(
        self, of: QueuedCase, rule: Rule, shape: Callable[[Case], Case], fair: Callable[[Case], bool]
    ) -> bool:
        """Queue the case without the cause of a known failure; return whether there is such a case."""
        variant = rule.variant(of.case) if of.depth < _VARIANTS_OF_ONE else None
        shaped = shape(variant) if variant is not None else None
        if shaped is None or not shaped.program or not fair(shaped):
            return False
        self._waiting.setdefault(shaped.world.size, []).append(
            QueuedCase(shaped, None, of.depth + 1, of.origin if of.number is None else of.number)
        )
        return True

    def next_batch(self, known: KnownFailures) -> list[QueuedCase]:
        """Return the next batch, the cases that may cost the ranks last; empty when the time or the cases are over."""
        while not self._budget.time_is_up():
            full = [size for size, cases in self._waiting.items() if len(cases) >= BATCH]
            full += [size for size, cases in self._costly.items() if len(cases) >= _COSTLY_AT_ONCE]
            if full:
                return self._take(full[0])
            if not self._fill(known):
                sizes = [*self._waiting, *self._costly]
                return self._take(sizes[0]) if sizes else []
        return []

    def _take(self, size: int) -> list[QueuedCase]:
        waiting = self._waiting.pop(size, [])
        if waiting[BATCH:]:
            self._waiting[size] = waiting[BATCH:]
        # Cases after one that kills its ranks run again on new ranks, so such cases come last.
        return waiting[:BATCH] + self._costly.pop(size, [])

    def _fill(self, known: KnownFailures) -> bool:
        """Queue one more case; return whether there was one."""
        number = self._next_number()
        if number is None:
            return self._take_postponed()
        case = self._draw(number)
        rule = known.may_end_ranks(case)
        if rule is None:
            self._waiting.setdefault(case.world.size, []).append(QueuedCase(case, number))
            self._others += 1
            self._in_a_row = 0
        else:
            self.postponed[rule.name] += 1
            self._postponed.append(number)
            self._in_a_row += 1
        if self._postponed and max(self._others, self._in_a_row) >= COSTLY_ONE_IN:
            self._take_postponed()
        return True

    def _next_number(self) -> int | None:
        if self._resumed:
            return self._resumed.popleft()
        if self._budget.enough:
            return None
        self._budget.begun += 1
        return self._verdicts.add_case()

    def _take_postponed(self) -> bool:
        self._others = self._in_a_row = 0
        if not self._postponed:
            return False
        number = self._postponed.popleft()
        case = self._draw(number)
        self._costly.setdefault(case.world.size, []).append(QueuedCase(case, number))
        return True
