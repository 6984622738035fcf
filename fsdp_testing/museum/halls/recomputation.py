"""Bugs of forwards that activation checkpointing runs again inside backward."""

from __future__ import annotations

from typing import Any

from fsdp_ref import compat
from fsdp_ref.runtime import backward, forward
from fsdp_ref.states import UnitState
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _expects_forward(original: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
    if compat.in_backward():
        raise AssertionError("Expects the handle's training state to be FORWARD but got BACKWARD_PRE")
    return original(unit, *args, **kwargs)


def _from_a_pass_inside(unit: Any) -> bool:
    task = unit.root.enter_backward()
    return unit.state is UnitState.BACKWARD and unit.backward_task != task


def _never_arrives(original: Any, unit: Any, grads: Any) -> None:
    if not _from_a_pass_inside(unit):
        original(unit, grads)


EXHIBITS = (
    Exhibit(
        id="B018",
        title="a forward that is run again in backward is taken for a mistake",
        story="States were kept for each flat parameter, and a check expected a forward to happen outside of backward, "
        "which reentrant checkpointing does not respect.",
        source="pytorch PR 89791",
        plant=planting((forward, "tracked_views", instead(_expects_forward))),
        checks=("activation_checkpointing.reentrant_around",),
        silent=False,
        fuzzed=False,
    ),
    Exhibit(
        id="B034",
        title="gradients from a forward that was run again are never reduced",
        story="Reentrant checkpointing runs backward inside backward. The hook on the gradients saw the outer pass only, "
        "so what came from inside stayed where it was.",
        source="pytorch PR 87413",
        plant=planting((backward, "on_gradients", instead(_never_arrives))),
        checks=("activation_checkpointing.reentrant_inside",),
        fuzzed=False,
    ),
)
