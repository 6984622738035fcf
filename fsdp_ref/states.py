"""The states of a unit, who owns the memory of its full parameters in each, and the legal moves.

One enum, one table. A unit and its flat parameter share one :class:`LifeCycle`, which refuses a move that the table does
not list, so that an illegal order of operations is named when it happens and not when a freed storage is read.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from fsdp_ref.errors import TransitionError, listing

if TYPE_CHECKING:
    from collections.abc import Mapping


class UnitState(Enum):
    """Who owns the full parameters of one unit.

    ::

        SHARDED -> GATHERING -> UNSHARDED -> FORWARD -> UNSHARDED -> BACKWARD -> SHARDED

    The shard itself always belongs to users and their optimizers; a gather reads it. A unit without parameters goes
    through the same states and owns no memory in any of them.
    """

    SHARDED = auto()
    """No owner: the storage of the full buffer is freed."""
    GATHERING = auto()
    """The collective that fills the buffer: it is allocated, and must not be read. Only waiting or dropping it ends this."""
    UNSHARDED = auto()
    """The next computation: the buffer is filled and idle, before forward, between forward and backward, or after a
    forward that no backward follows. An optimizer step makes it out of date, so the next forward of the tree drops it."""
    ACCUMULATING = auto()
    """The accumulation: a backward without synchronisation left the buffer filled for the next forward. No step may come
    before a backward with synchronisation, so the next forward of the tree keeps it."""
    FORWARD = auto()
    """The module's forward: modules show tracked views of the buffer. It is not released until the call ends."""
    BACKWARD = auto()
    """Autograd, from the first gradient or saved parameter that it asks for until the unit's gradients are complete."""
    SUMMONED = auto()
    """A user, who edits a buffer of his own; whether the unit's is filled too is what it was before, and is again."""

    __hash__ = object.__hash__  # looked up several times per unit and step, and Enum's own hash is slow


class ReshardReason(Enum):
    """Why a unit releases its full parameters; see ``runtime.unit.Unit.reshard`` for what follows."""

    AFTER_FORWARD = auto()
    """The unit's forward ended. The strategy decides."""
    AFTER_BACKWARD = auto()
    """The unit's gradients are complete, or the pass ended without any. The strategy and synchronisation decide."""
    OUT_OF_DATE = auto()
    """Parameters changed, or may have: a new forward of the tree begins, or a user edited, cast or moved them."""
    UNUSED = auto()
    """Gathered ahead of need, and forward ended without using it."""
    FAILED = auto()
    """Forward or backward raised."""


_S = UnitState
TRANSITIONS: Final[Mapping[UnitState, frozenset[UnitState]]] = {
    _S.SHARDED: frozenset({_S.GATHERING, _S.SUMMONED}),
    # GATHERING -> SHARDED: an unused prefetch, or an exception while the gather was in flight.
    _S.GATHERING: frozenset({_S.UNSHARDED, _S.SHARDED}),
    _S.UNSHARDED: frozenset({_S.FORWARD, _S.BACKWARD, _S.ACCUMULATING, _S.SHARDED, _S.SUMMONED}),
    _S.ACCUMULATING: frozenset({_S.FORWARD, _S.BACKWARD, _S.SHARDED, _S.SUMMONED}),
    # FORWARD -> BACKWARD: the end of a forward that activation checkpointing runs again inside the unit's backward.
    _S.FORWARD: frozenset({_S.UNSHARDED, _S.ACCUMULATING, _S.BACKWARD, _S.SHARDED}),
    _S.BACKWARD: frozenset({_S.FORWARD, _S.ACCUMULATING, _S.SHARDED}),
    _S.SUMMONED: frozenset({_S.SHARDED, _S.UNSHARDED, _S.ACCUMULATING}),
}

READABLE: Final = frozenset({_S.UNSHARDED, _S.ACCUMULATING, _S.FORWARD, _S.BACKWARD})
"""States in which the full buffer is certainly filled, and belongs to computation."""


class LifeCycle:
    """The state of one unit, shared by the unit and its flat parameter."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = UnitState.SHARDED

    def move(self, new: UnitState, who: str) -> None:
        """Go to ``new``; ``who`` is the unit's name, for the message.

        Raises:
            TransitionError: the table does not list the move.
        """
        legal = TRANSITIONS[self.state]
        if new not in legal:
            raise TransitionError(
                f"unit {who or 'root'!r}: expected a move from {self.state.name} to one of "
                f"[{listing(sorted(s.name for s in legal))}], got {new.name}. This order of operations is not legal; "
                "finish or leave the current phase first."
            )
        self.state = new


# ---------------------------------------------------------------------- what torch calls them


class TrainingState(Enum):
    """What one unit is busy with, in the words of torch's ``FullyShardedDataParallel.training_state``."""

    IDLE = auto()
    """Nothing runs; parameters and gradients may be edited."""
    FORWARD_BACKWARD = auto()
    """Forward or backward of this unit runs."""
    SUMMON_FULL_PARAMS = auto()
    """A user has the full parameters."""


def training_state_of(state: UnitState) -> TrainingState:
    """Return torch's word for a state."""
    if state is UnitState.SUMMONED:
        return TrainingState.SUMMON_FULL_PARAMS
    busy = state is UnitState.FORWARD or state is UnitState.BACKWARD
    return TrainingState.FORWARD_BACKWARD if busy else TrainingState.IDLE
