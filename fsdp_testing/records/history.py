"""The events of all ranks of one run, in one value that checkers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fsdp_testing.records.document import check_format, decode, encode, load_json, to_json
from fsdp_testing.records.event import CollectiveEvent, Event, UnitEvent

HISTORY_FORMAT = "fsdp_testing/history"
HISTORY_VERSION = 1

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class History:
    """`ranks[r]` holds the events of rank r in the order they happened there."""

    ranks: tuple[tuple[Event, ...], ...]

    def collectives(self, rank: int) -> tuple[CollectiveEvent, ...]:
        """Return the collectives of `rank` in order."""
        return self._only(rank, CollectiveEvent)

    def units(self, rank: int) -> tuple[UnitEvent, ...]:
        """Return the unit transitions of `rank` in order."""
        return self._only(rank, UnitEvent)

    def _only(self, rank: int, kind: type[E]) -> tuple[E, ...]:
        return tuple(event for event in self.ranks[rank] if isinstance(event, kind))

    def to_json(self) -> str:
        """Return the history as a JSON document."""
        return to_json({"format": HISTORY_FORMAT, "version": HISTORY_VERSION, **encode(self)})

    @classmethod
    def from_json(cls, text: str, where: str = "history") -> History:
        """Read a history; raises InvalidRecord if it is damaged or newer than this version."""
        data = load_json(text, where)
        check_format(data, HISTORY_FORMAT, HISTORY_VERSION, where)
        return decode(cls, {"ranks": data.get("ranks")}, where)
