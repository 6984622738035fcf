"""What is the simplest case that still fails in the same way?

First much simpler cases are asked outright (`minimal_candidates`), then parts of what is left go (`ddmin`). A failure that
costs the ranks is met as rarely as possible: the boldest candidate first, one after the other, up to the first that keeps
the signature. What passes costs nothing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_testing.cases.records import ENDS_RANKS, Case
from fsdp_testing.explain.shrinking import minimal_candidates, reductions
from fsdp_testing.explain.shrinking.ddmin import BudgetSpent, Kind, Search
from fsdp_testing.judging.signature import Signature

SECONDS = 20.0
_AT_ONCE = 12
KINDS: tuple[Kind, ...] = (
    reductions.deletions,
    reductions.pairs,
    reductions.settings,
    reductions.cuts,
    reductions.trees,
    reductions.operations,
)
"""In which ways a case becomes simpler, in the order in which they are tried."""

Attempt = Callable[[Sequence[Case], Signature], Sequence[tuple[Case, Signature | None]]]
"""Runs cases of one world size, with a snapshot after every operation, and returns how each fails.

Where the signature that is looked for costs the ranks, what comes after the first case that has it may be left out."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What shrinking gave.

    Attributes:
        case: The simplest case found.
        attempts: Number of cases run.
        seconds: Time taken.
        complete: No reduction is left that keeps the signature; else the time was up.
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
        case: Where to start.
        signature: What it looks like.
        attempt: Runs candidates.
        shape: Gives the legal case nearest to a reduced one.
        fair: Whether an implementation may be asked a case at all.
        seconds: When to be content with what was found.
    """
    start = time.monotonic()
    attempts = 0

    def keeping(batch: list[Case]) -> list[Case]:
        nonlocal attempts
        if batch and time.monotonic() > start + seconds:
            raise BudgetSpent
        kept: list[Case] = []
        for size in sorted({one.world.size for one in batch}):
            results = attempt([one for one in batch if one.world.size == size], signature)
            attempts += len(results)
            kept += [one for one, found in results if found == signature]
        return [one for one in batch if one in kept]

    search = Search(case, keeping, _AT_ONCE, shape, fair)
    complete = search.run(lambda: _simplify(search, signature))
    return Shrunk(search.case, attempts, time.monotonic() - start, complete)


def _simplify(search: Search, signature: Signature) -> None:
    """Take candidates until nothing simpler keeps the signature."""
    costly = signature.kind in ENDS_RANKS
    search.take_first(minimal_candidates.on_small_models(search.case))
    if costly:
        search.take_first(minimal_candidates.minimal_programs_of_beginnings(search.case, signature))
        search.take_first([minimal_candidates.simplest(search.case)])
    search.take_first(minimal_candidates.beginnings(search.case, signature))
    search.take_first(minimal_candidates.minimal_programs(search.case))
    before = None
    while before != search.case:
        before = search.case
        for kind in KINDS:
            while search.take_parts(kind, boldly=costly):
                pass
