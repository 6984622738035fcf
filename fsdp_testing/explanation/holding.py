"""Which units hold their full parameters when an operation begins? Pure: from a history."""

from __future__ import annotations

from fsdp_testing.records import History


def held_before(history: History, operation: int) -> dict[str, tuple[int, ...]]:
    """Returns units (FQN, the root's is empty) that are gathered when `operation` begins, with the ranks, in order."""
    found: dict[str, list[int]] = {}
    for rank in range(len(history.ranks)):
        gathered: dict[str, bool] = {}
        for event in history.units(rank):
            if event.operation < operation and event.transition in ("gather", "free"):
                gathered[event.unit] = event.transition == "gather"
        for unit in sorted(unit for unit, held in gathered.items() if held):
            found.setdefault(unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in found.items()}
