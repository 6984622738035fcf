"""Finds the parts that a failure needs: delta debugging, with any runner of candidates.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002, with one change: every single part is
left out in a separate attempt, many in one batch. Then all parts that were not needed are left out together, or half of them,
and so on. A failure that needs a fixed set of parts is reduced to it after two batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from fsdp_testing.cases.records import Case

Item = TypeVar("Item")

Keeping = Callable[[list[Case]], list[Case]]
"""Runs cases and returns those that still fail in the same way, in order; raises `BudgetSpent` when nothing is left."""


class BudgetSpent(Exception):
    """The budget is spent."""


class Reduction(NamedTuple):
    """A case without one part, and that part's name.

    Attributes:
        key: Names the part within its kind of reduction; keys of one kind can be sorted, later places come later.
        case: The simpler case.
    """

    key: tuple[Any, ...]
    case: Case


Kind = Callable[[Case], Iterator[Reduction]]


@dataclass(slots=True)
class Search:
    """One search for a simpler case that fails in the same way, with what it has found so far.

    Attributes:
        case: The case to begin with, and then the simplest so far.
        keeping: Runs candidates.
        at_once: How many candidates are run together.
        shape: Gives the legal case nearest to a candidate.
        fair: Whether a candidate may be run at all.
    """

    case: Case
    keeping: Keeping
    at_once: int = 1
    shape: Callable[[Case], Case] = lambda case: case
    fair: Callable[[Case], bool] = lambda _: True
    _seen: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = {self.case.to_json()}

    def run(self, search: Callable[[], object]) -> bool:
        """Call `search`, which takes candidates; return False if the budget was spent before it ended."""
        try:
            search()
        except BudgetSpent:
            return False
        return True

    def take_first(self, candidates: Iterable[Case]) -> bool:
        """Take the first candidate that fails in the same way; return whether there was one."""
        fresh = self._fresh(candidates)
        while batch := list(islice(fresh, self.at_once)):
            failing = self.keeping(batch)
            if failing:
                self.case = failing[0]
                return True
        return False

    def take_parts(self, kind: Kind, *, boldly: bool = False) -> bool:
        """Leave out parts of one kind, as many as can be left out together; return whether there was any.

        Args:
            kind: Gives the parts.
            boldly: Try many parts at once before single ones: for failures that are costly to meet.
        """
        parts = list(kind(self.case))
        if boldly:
            return self.take_first(
                joined(kind, self.case, [part.key for part in stretch]) for stretch in stretches(parts)
            )
        chunks = (parts[start : start + self.at_once] for start in range(0, len(parts), self.at_once))
        return any(self._take_of_chunk(kind, chunk) for chunk in chunks)

    def _take_of_chunk(self, kind: Kind, parts: list[Reduction]) -> bool:
        shaped = {part.key: self.shape(part.case) for part in parts}
        failing = self.keeping(list(self._fresh(shaped.values())))
        if not failing:
            return False
        taken = [part for part in parts if shaped[part.key] in failing]
        together = [joined(kind, self.case, [part.key for part in stretch]) for stretch in stretches(taken, smallest=2)]
        self.case = failing[0]
        self.take_first(together)
        return True

    def _fresh(self, candidates: Iterable[Case]) -> Iterator[Case]:
        """The candidates as legal cases, without those that were tried, are empty, or may not be asked."""
        for candidate in candidates:
            shaped = self.shape(candidate)
            document = shaped.to_json()
            if document not in self._seen and shaped.program and self.fair(shaped):
                self._seen.add(document)
                yield shaped


def joined(kind: Kind, case: Case, keys: Iterable[tuple[Any, ...]]) -> Case:
    """Return the case without several parts.

    Args:
        kind: Gave the keys for this case.
        case: The case to begin with.
        keys: The parts; a part that no longer exists at its turn is skipped.
    """
    # Remove later parts first, so that the indices of earlier ones stay valid.
    for key in sorted(keys, reverse=True):
        case = next((part.case for part in kind(case) if part.key == key), case)
    return case


def stretches(items: Sequence[Item], smallest: int = 1) -> Iterator[Sequence[Item]]:
    """Yield all items, each half of them, each quarter, ... down to stretches of `smallest`."""
    size = len(items)
    while size >= smallest:
        yield from (items[start : start + size] for start in range(0, len(items), size))
        size = (size + 1) // 2 if size > 1 else 0
