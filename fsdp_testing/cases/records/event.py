"""What happened on the ranks, one event at a time: collectives, unit transitions, autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. `sequence` counts events of one rank; `time` is seconds of a clock shared by the ranks."""

    sequence: int
    time: float
    operation: int
    """Index of the program's operation during which it happened; -1 before the first."""


@dataclass(frozen=True, slots=True)
class CollectiveEvent(Event):
    """One collective as issued."""

    name: str
    group: tuple[int, ...]
    dtype: str
    numel: int
    reduce_op: str = ""
    root: int = -1
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class UnitEvent(Event):
    """A unit changes its state: `unshard`, `reshard`, `free`, `prefetch`."""

    unit: str
    transition: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AutogradEvent(Event):
    """`pre_forward`, `post_forward`, `pre_backward`, `post_backward` of a module."""

    module: str
    moment: str


@dataclass(frozen=True, slots=True)
class OperationEvent(Event):
    """An operation of the program begins."""


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """The rank has waited for a collective from `time` on, for `seconds`."""

    seconds: float


E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class History:
    """The events of all ranks of one run: `ranks[r]` holds the events of rank r in order."""

    ranks: tuple[tuple[Event, ...], ...]

    def collectives(self, rank: int) -> tuple[CollectiveEvent, ...]:
        """Return the collectives of `rank` in order."""
        return self._only(rank, CollectiveEvent)

    def units(self, rank: int) -> tuple[UnitEvent, ...]:
        """Return the unit transitions of `rank` in order."""
        return self._only(rank, UnitEvent)

    def _only(self, rank: int, kind: type[E]) -> tuple[E, ...]:
        return tuple(event for event in self.ranks[rank] if isinstance(event, kind))
