"""Which states do a unit, a handle and a shard go through, and which moves are legal?

Three enums, three tables. A class that has a life cycle keeps one member and changes it through
:func:`check_transition`, so that an illegal order of operations is named when it happens and not when a freed
storage is read. Source: ``torch.distributed.fsdp._common_utils`` for the names of the first two enums.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

from fsdp_ref.errors import TransitionError, explain, listing

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=Enum)


class _State(Enum):
    """An enum of states. Members are looked up in tables several times per unit and step, and Enum's own hash is slow."""

    __hash__ = object.__hash__


class TrainingState(_State):
    """What one unit is busy with."""

    IDLE = auto()
    """Nothing runs; parameters and gradients may be edited."""
    FORWARD_BACKWARD = auto()
    """A forward, or a backward hook, of this unit runs."""
    SUMMON_FULL_PARAMS = auto()
    """A user holds the full parameters."""


class HandleTrainingState(_State):
    """Which phase one flat parameter is in."""

    IDLE = auto()
    """No phase runs."""
    FORWARD = auto()
    """From pre-forward until post-forward."""
    BACKWARD_PRE = auto()
    """From pre-backward until the gradient is complete."""
    BACKWARD_POST = auto()
    """From the complete gradient until the end of backward."""
    SUMMON_FULL_PARAMS = auto()
    """A user holds the full parameters."""


class ShardState(_State):
    """Which copy of one flat parameter is live, hence who owns memory."""

    SHARDED = auto()
    """Only this rank's shard is allocated; the full buffer's storage is freed."""
    UNSHARDING = auto()
    """The full buffer is allocated and a gather into it is in flight: nobody may read it."""
    UNSHARDED = auto()
    """The full buffer is filled; parameters are views of it."""


TRAINING_TRANSITIONS: Final[Mapping[TrainingState, frozenset[TrainingState]]] = {
    TrainingState.IDLE: frozenset({TrainingState.FORWARD_BACKWARD, TrainingState.SUMMON_FULL_PARAMS}),
    # A unit may be entered again while it runs: a module used by its own descendant, a recomputed forward in backward.
    TrainingState.FORWARD_BACKWARD: frozenset({TrainingState.IDLE, TrainingState.FORWARD_BACKWARD}),
    TrainingState.SUMMON_FULL_PARAMS: frozenset({TrainingState.IDLE}),
}

_H = HandleTrainingState
HANDLE_TRANSITIONS: Final[Mapping[HandleTrainingState, frozenset[HandleTrainingState]]] = {
    # IDLE -> BACKWARD_POST: a loss taken from an intermediate never passes the output's pre-backward hook.
    _H.IDLE: frozenset({_H.FORWARD, _H.BACKWARD_PRE, _H.BACKWARD_POST, _H.SUMMON_FULL_PARAMS}),
    _H.FORWARD: frozenset({_H.IDLE, _H.FORWARD, _H.BACKWARD_PRE, _H.BACKWARD_POST}),
    # BACKWARD_* -> FORWARD: activation checkpointing runs the forward again inside backward.
    _H.BACKWARD_PRE: frozenset({_H.IDLE, _H.FORWARD, _H.BACKWARD_PRE, _H.BACKWARD_POST}),
    # BACKWARD_POST -> BACKWARD_PRE and itself: a unit called several times completes its gradient several times.
    _H.BACKWARD_POST: frozenset({_H.IDLE, _H.FORWARD, _H.BACKWARD_PRE, _H.BACKWARD_POST}),
    _H.SUMMON_FULL_PARAMS: frozenset({_H.IDLE}),
}

SHARD_TRANSITIONS: Final[Mapping[ShardState, frozenset[ShardState]]] = {
    ShardState.SHARDED: frozenset({ShardState.UNSHARDING}),
    # UNSHARDING -> SHARDED: a prefetch that nobody used, or an exception while the gather was in flight.
    ShardState.UNSHARDING: frozenset({ShardState.UNSHARDED, ShardState.SHARDED}),
    ShardState.UNSHARDED: frozenset({ShardState.SHARDED}),
}


def check_transition(table: Mapping[S, frozenset[S]], old: S, new: S, *, where: str) -> S:
    """Return ``new`` when ``table`` allows ``old -> new``.

    Args:
        table: legal successors of each state.
        old: the present state.
        new: the state asked for.
        where: who moves, for the message (a unit's or a handle's name).

    Raises:
        TransitionError: the table does not list the move.
    """
    if new in table[old]:
        return new
    raise TransitionError(
        explain(
            where,
            expected=f"a move from {old.name} to one of [{listing(sorted(s.name for s in table[old]))}]",
            got=new.name,
            remedy="This order of operations is not legal; finish or leave the present phase first",
        )
    )
