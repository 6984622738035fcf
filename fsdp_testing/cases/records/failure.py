"""The ways in which a case fails: one list for every report, rule and signature."""

from __future__ import annotations

import enum

_FORMER = {"desynchronised": "uncoordinated"}


class FailureKind(enum.StrEnum):
    """What sort of failure it is; documents of earlier versions may call `uncoordinated` `desynchronised`."""

    DIVERGED = "diverged"
    """Numbers are not those of the oracle."""
    DISAGREED = "disagreed"
    """Ranks contradict one another."""
    MISSING = "missing"
    """A rank did not report it, or no rank has it."""
    RAISED = "raised"
    """Every rank raised."""
    ONE_RAISED = "one_raised"
    """Some ranks raised; the others went on or waited."""
    UNCOORDINATED = "uncoordinated"
    """Ranks issued different collectives, or events in an order that sharding forbids."""
    RACE = "race"
    """Nothing orders two uses of memory on different streams."""
    KEPT = "kept"
    """Full parameters stay in memory that must be given up."""
    EXCESS = "excess"
    """More is communicated than the strategy needs."""
    LEAKED = "leaked"
    """State of the process, or the model itself, outlives the case."""
    DIED = "died"
    """A process ended."""
    HUNG = "hung"
    """A process did not come back in time."""

    @classmethod
    def _missing_(cls, value: object) -> FailureKind | None:
        return cls(_FORMER[value]) if isinstance(value, str) and value in _FORMER else None


RAISES = frozenset({FailureKind.RAISED, FailureKind.ONE_RAISED})
"""Exceptions, on all ranks or on some."""

LOSES_RANKS = frozenset({FailureKind.DIED, FailureKind.HUNG})
"""Failures that cost a process; an overloaded machine can cause one, too."""

ENDS_RANKS = LOSES_RANKS | {FailureKind.ONE_RAISED, FailureKind.UNCOORDINATED}
"""Failures after which the ranks cannot go on together."""


class Mismatch(enum.StrEnum):
    """In what a quantity differs from what is expected of it."""

    NUMBERS = "is off"
    NONE = "is None"
    NOT_NONE = "holds numbers"
    DTYPE = "has another dtype"
    SHAPE = "has another shape"
    REQUIRES_GRAD = "has another requires_grad"
