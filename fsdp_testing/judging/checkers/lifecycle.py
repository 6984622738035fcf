"""Checks that every unit keeps the life cycle that sharding promises. Pure: from a history to the rules it breaks.

Rules: memory is gathered once before it is freed again; what was gathered has been freed when an iteration is over,
for strategies that promise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records.event import History


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that one rank's history breaks, and the sentence about it."""

    rank: int
    unit: str
    operation: int
    sentence: str


def check_lifecycle(history: History) -> tuple[BrokenRule, ...]:
    """Return what breaks this: every gather is followed by a free before the next gather, and no free comes without a gather."""
    broken: list[BrokenRule] = []
    for rank in range(len(history.ranks)):
        gathered: dict[str, int] = {}
        for event in history.units(rank):
            name = event.unit or "(root)"
            if event.transition == "gather":
                if event.unit in gathered:
                    sentence = f"unit {name} is gathered again while it holds its full parameters"
                    broken.append(BrokenRule(rank, event.unit, event.operation, sentence))
                gathered[event.unit] = event.operation
            elif event.transition == "free" and gathered.pop(event.unit, None) is None:
                sentence = f"unit {name} is freed though it was not gathered"
                broken.append(BrokenRule(rank, event.unit, event.operation, sentence))
    return tuple(broken)


def unsharded_before(history: History, operation: int) -> dict[str, tuple[int, ...]]:
    """Return units (FQN, the root's is empty) that are gathered when `operation` begins, with the ranks, in order."""
    by_unit: dict[str, list[int]] = {}
    for rank in range(len(history.ranks)):
        gathered: dict[str, bool] = {}
        for event in history.units(rank):
            # The last transition before the operation decides; what happens during it comes too late.
            if event.operation < operation and event.transition in ("gather", "free"):
                gathered[event.unit] = event.transition == "gather"
        for unit in sorted(unit for unit, open_now in gathered.items() if open_now):
            by_unit.setdefault(unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in by_unit.items()}
