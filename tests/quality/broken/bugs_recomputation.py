"""Bugs of forwards that activation checkpointing runs again inside backward."""

from __future__ import annotations

from typing import Any

from planting import known_bug

from fsdp_ref import compat
from fsdp_ref.runtime import backward, forward
from fsdp_ref.states import UnitState


def _from_a_pass_inside(unit: Any) -> bool:
    task = unit.root.enter_backward()
    return unit.state is UnitState.BACKWARD and unit.backward_task != task


@known_bug(
    "B018",
    forward,
    "tracked_views",
    "pytorch PR 89791",
    "activation_checkpointing.reentrant_around",
    silent=False,
    fuzzed=False,
)
def expects_forward(original: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward that is run again in backward is taken for a mistake.

    States were kept for each flat parameter, and a check expected a forward to happen outside of backward, which
    reentrant checkpointing does not respect.
    """
    if compat.in_backward():
        raise AssertionError("Expects the handle's training state to be FORWARD but got BACKWARD_PRE")
    return original(unit, *args, **kwargs)


@known_bug(
    "B034", backward, "on_gradients", "pytorch PR 87413", "activation_checkpointing.reentrant_inside", fuzzed=False
)
def never_arrives(original: Any, unit: Any, grads: Any) -> None:
    """Gradients from a forward that was run again are never reduced.

    Reentrant checkpointing runs backward inside backward. The hook on the gradients saw the outer pass only, so what
    came from inside stayed where it was.
    """
    if not _from_a_pass_inside(unit):
        original(unit, grads)
