"""Bugs of what happens around forward and backward of a unit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from fsdp_ref.runtime import backward, forward
from fsdp_ref.runtime.root import Root
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import ReshardReason, UnitState
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _needs_a_positional_input(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    args[0]
    return original(unit, frame, args, kwargs)


def _unused_stay_gathered(original: Any, self: Any, reason: Any) -> None:
    rests = self.state is UnitState.UNSHARDED or self.state is UnitState.ACCUMULATING
    if reason is not ReshardReason.AFTER_BACKWARD or self.handle is None or not rests:
        original(self, reason)
        return
    if self.state is UnitState.UNSHARDED:
        self.move(UnitState.ACCUMULATING)
    self.handle.originals.show_sharded()


def _unwatched(original: Any, self: Any) -> Any:
    return nullcontext()


def _no_hook_on_views(original: Any, unit: Any, output: Any, inputs: Any) -> Any:
    return output if isinstance(output, torch.Tensor) and output._is_view() else original(unit, output, inputs)


EXHIBITS = (
    Exhibit(
        id="B013",
        title="inner units read their first positional input",
        story="Inputs were moved to the device by looking at args[0]; a unit that is called with keywords only, or with "
        "nothing, raised an IndexError.",
        source="pytorch PR 91078",
        plant=planting((forward, "_inputs", instead(_needs_a_positional_input))),
        checks=("wrapping.keyword_inputs",),
        silent=False,
    ),
    Exhibit(
        id="B037",
        title="a unit that gets no gradient stays gathered through the step",
        story="Units were given up when their gradients arrived. One that the loss does not reach kept the weights it "
        "had gathered, and computed with them in the next iteration.",
        source="pytorch issue 83107, issue 83129, PR 80245",
        plant=planting((Unit, "reshard", instead(_unused_stay_gathered))),
        checks=("outputs.bypassed",),
    ),
    Exhibit(
        id="B047",
        title="a view that is changed in place loses the hook that gathers",
        story="A unit returned a view and its caller added to it in place: autograd rebuilt the node, and the hook that "
        "gathers for backward was gone with the old one.",
        source="pytorch issue 181832, PR 181850",
        plant=planting(
            (Root, "watch_saved_tensors", instead(_unwatched)),
            (backward, "hook_outputs", instead(_no_hook_on_views)),
        ),
        checks=("outputs.views_changed_in_place",),
        silent=False,
    ),
)
