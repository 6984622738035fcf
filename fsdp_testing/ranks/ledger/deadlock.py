"""Proves deadlocks: a rank that this rank is about to wait for is stuck until this rank does something else.

Rank r is stuck on rank s when r waits in a collective that needs s and that s has not issued. Starting from this rank,
which is about to wait and will issue nothing more, the ranks stuck on it, directly or through others, are certain to stay
so: each fact is read after the one it rests on, with the fence in between. A rank with several Python threads is never
counted, since another thread may issue what the waiting one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_testing.ranks.ledger.memory import ANYBODY, NUMBER_BITS, Area, Entry, LedgerMemory, Waiting
from fsdp_testing.ranks.ledger.records import group_facts


def entry_text(area: Area, entry: Entry | None) -> str:
    """Return what was issued and where, from the strings of the rank that wrote the entry."""
    if entry is None:
        return "a collective that is no longer in the ledger"
    strings = area.strings()
    what, site = (strings[i] if i < len(strings) else "?" for i in (entry.description, entry.call_site))
    return f"{what} at {site}"


class Deadlocks:
    """The search, for one rank."""

    def __init__(self, memory: LedgerMemory, rank: int) -> None:
        self._areas = areas = memory.areas
        self._cross = memory.fence.cross
        self._rank = rank
        self._words = areas[0].words
        self._others = [(area.waiting_word, area) for index, area in enumerate(areas) if index != rank]
        self._members: dict[int, tuple[int, ...]] = {}

    def forget(self) -> None:
        """A new job begins: groups may have other members."""
        self._members.clear()

    def possible(self, lines: Mapping[int, Any], key: int, epoch: int) -> bool:
        """Return, cheaply, whether any rank waits in another group than `key` for something this rank has not issued."""
        # Read once, after the fence of the caller: this only saves the search where nobody waits elsewhere; `find` proves.
        words = self._words
        for at, area in self._others:
            meta, group = words[at + 1], words[at]
            if not meta or group == key:
                continue
            line = lines.get(group)
            if line is not None and line.number >= meta >> NUMBER_BITS:
                continue
            if area.epoch() & 0xFFFFFFFF == epoch and self._rank in self._members_of(area, group):
                return True
        return False

    def find(self, line: Any, awaited: int, epoch: int) -> list[tuple[int, Waiting, int]]:
        """Find a chain of waits (rank, wait, rank it waits for) from a rank that this one awaits back to this one, or none."""
        stuck: dict[int, tuple[Waiting, int]] = {}
        while True:
            self._cross()
            stuck_rank = self._next_stuck(stuck, epoch)
            if stuck_rank is None:
                return []
            rank, waiting, on = stuck_rank
            stuck[rank] = (waiting, on)
            needed = rank in line.group.members if awaited == ANYBODY else rank == awaited
            if needed and self._areas[rank].issued(line.group.key) < line.number:
                return _chain(stuck, rank)

    def _next_stuck(self, stuck: Mapping[int, Any], epoch: int) -> tuple[int, Waiting, int] | None:
        for rank, area in enumerate(self._areas):
            if rank == self._rank or rank in stuck or area.epoch() & 0xFFFFFFFF != epoch:
                continue
            waiting = area.waiting()
            # Its wait must be in the last collective of that group: otherwise the rank has left that wait and goes on.
            if waiting is None or not waiting.alone or area.issued(waiting.group_key) != waiting.number:
                continue
            members = self._members_of(area, waiting.group_key)
            for on in (self._rank, *stuck):
                needed = on in members if waiting.awaited == ANYBODY else on == waiting.awaited
                if needed and self._areas[on].issued(waiting.group_key) < waiting.number:
                    return rank, waiting, on
        return None

    def _members_of(self, area: Area, key: int) -> tuple[int, ...]:
        if key not in self._members:
            facts = group_facts(area.strings())
            if key not in facts:
                return ()
            self._members[key] = facts[key][1]
        return self._members[key]

    def explain(self, chain: list[tuple[int, Waiting, int]], line: Any) -> str:
        """Return the message: who waits for whom in what."""
        mine = self._areas[self._rank]
        own = entry_text(mine, mine.entry(line.slot, line.number))
        waits = "; ".join(self._explain_wait(rank, waiting, on) for rank, waiting, on in chain)
        return (
            f"groups are used in opposite order: rank {self._rank} is about to wait in {own} (#{line.number} of the "
            f"{line.group.label}) for rank {chain[0][0]}; {waits}, which is never issued. "
            "Use groups that share ranks in one order on all of them."
        )

    def _explain_wait(self, rank: int, waiting: Waiting, on: int) -> str:
        area = self._areas[rank]
        slot = area.slot_of(waiting.group_key)
        entry = area.entry(slot, waiting.number) if slot is not None else None
        label, _ = group_facts(area.strings()).get(waiting.group_key, ("another group", ()))
        return f"rank {rank} waits in {entry_text(area, entry)} (#{waiting.number} of the {label}) for rank {on}"


def _chain(stuck: Mapping[int, tuple[Waiting, int]], first: int) -> list[tuple[int, Waiting, int]]:
    chain: list[tuple[int, Waiting, int]] = []
    rank = first
    while rank in stuck:
        waiting, on = stuck[rank]
        chain.append((rank, waiting, on))
        rank = on
    return chain
