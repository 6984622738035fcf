"""Compares the order of events of two histories, and of the ranks of one. Pure.

Order parity compares what each implementation does with its units and puts on the wire. Numbers cannot show it: an
extra gather or another order of handles gives the same gradients, until ranks that run different paths meet.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter

from fsdp_testing.cases.records.event import History


@dataclass(frozen=True, slots=True)
class OrderRow:
    """One line of a side-by-side comparison; `same` is False where the two differ, "" where one has nothing."""

    left: str
    right: str
    same: bool


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """One aspect compared ("units", "transitions", "collectives") on one rank."""

    aspect: str
    rank: int
    rows: tuple[OrderRow, ...]

    @property
    def equal(self) -> bool:
        """True when every row is the same."""
        return all(row.same for row in self.rows)


def compare_steps(aspect: str, rank: int, left: Sequence[str], right: Sequence[str]) -> OrderComparison:
    """Align two sequences, longest common parts first, into rows."""
    rows: list[OrderRow] = []
    matcher = difflib.SequenceMatcher(a=list(left), b=list(right), autojunk=False)
    for tag, left_start, left_stop, right_start, right_stop in matcher.get_opcodes():
        pairs = zip_longest(left[left_start:left_stop], right[right_start:right_stop], fillvalue="")
        rows += [OrderRow(mine, theirs, tag == "equal") for mine, theirs in pairs]
    return OrderComparison(aspect, rank, tuple(rows))


def transition_steps(history: History, rank: int, kinds: frozenset[str]) -> tuple[str, ...]:
    """Unit transitions of `rank` as text, only the `kinds` asked for; a mark where the program's operation changes."""
    steps: list[str] = []
    operation: int | None = None
    for event in history.units(rank):
        if event.transition in kinds:
            if event.operation != operation:
                operation = event.operation
                steps.append(f"— operation {operation}")
            steps.append(f"{event.transition} {event.unit or '(root)'}")
    return tuple(steps)


def collective_steps(history: History, rank: int) -> tuple[str, ...]:
    """Collectives of `rank` as text: kind, reduce op, dtype, elements, group size.

    Kinds, not names: gathering into a list, into one tensor, or functionally is one kind.
    """
    steps = []
    for event in history.collectives(rank):
        reducing = f"({event.reduce_op})" if event.reduce_op else ""
        kind = event.name.removesuffix("_single").removesuffix("_tensor")
        steps.append(f"{kind}{reducing} {event.dtype}[{event.numel}] on {len(event.group)} ranks")
    return tuple(steps)


def ranks_agree(history: History) -> str:
    """Empty when every rank issued the same collectives in the same order; else the first difference, in words.

    Compares only ranks' collectives on groups of which they are both members.
    """
    for rank in range(1, len(history.ranks)):
        mine = [e for e in history.collectives(0) if rank in e.group]
        theirs = [e for e in history.collectives(rank) if 0 in e.group]
        # Sizes are each rank's own.
        what = attrgetter("name", "reduce_op", "root", "dtype", "group")
        for number, (left, right) in enumerate(zip_longest(mine, theirs), start=1):
            if left is None or right is None:
                missing, found = (0, right) if left is None else (rank, left)
                return f"rank {missing} never issues {found.name} (number {number})"
            if what(left) != what(right):
                return f"number {number}: rank 0 issues {left.name}, rank {rank} issues {right.name}"
    return ""
