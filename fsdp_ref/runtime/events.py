"""Events of units, step by step, for observers.

A recorder subscribes; nothing needs to be patched. Without subscribers an event costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto


class UnitEventKind(Enum):
    """One step in the life of a unit."""

    PRE_FORWARD = auto()
    """Forward of the unit begins."""
    POST_FORWARD = auto()
    """Forward of the unit has ended."""
    PRE_BACKWARD = auto()
    """The unit's backward begins (once per backward)."""
    POST_BACKWARD = auto()
    """All gradients of the unit's parameters have arrived."""
    UNSHARD = auto()
    """The unit requests its full parameters (they may already be unsharded, or a prefetch requests early)."""
    GATHER = auto()
    """The all-gather is issued. Earlier than UNSHARD where communication is overlapped without being asked to."""
    RESHARD = auto()
    """The unit gives its full parameters up; ``freed`` says whether their memory is gone."""
    REDUCE = auto()
    """The reduction of the unit's gradient is issued."""
    ACCUMULATE = auto()
    """The unit's gradient is kept without reducing it."""


@dataclass(frozen=True, slots=True)
class UnitEvent:
    """One step of one unit.

    Attributes:
        kind: what happened.
        unit: the unit's name below its root; empty for the root.
        fqns: names of the unit's parameters; empty for a unit without any.
        prefetch: an UNSHARD or GATHER ahead of need.
        freed: for RESHARD, whether memory was freed.
    """

    kind: UnitEventKind
    unit: str
    fqns: tuple[str, ...]
    prefetch: bool = False
    freed: bool = False


Observer = Callable[[UnitEvent], None]

OBSERVERS: list[Observer] = []
"""Subscribers of this process; use :func:`observe`."""


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer`` with every event of this process while the context lasts."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)
