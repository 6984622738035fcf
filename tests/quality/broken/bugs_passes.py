"""Bugs of what happens around forward and backward of a unit."""

from __future__ import annotations

from typing import Any

import torch
from bugs_unsharded_state import UNWATCHED
from planting import known_bug

from fsdp_ref.runtime import backward, forward
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import ReshardReason, UnitState


@known_bug("B013", forward, "_inputs", "pytorch PR 91078", "wrapping.keyword_inputs", silent=False)
def needs_a_positional_input(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Inner units read their first positional input.

    Inputs were moved to the device by looking at args[0]; a unit that is called with keywords only, or with nothing,
    raised an IndexError.
    """
    args[0]
    return original(unit, frame, args, kwargs)


@known_bug("B037", Unit, "reshard", "pytorch issue 83107, issue 83129, PR 80245", "outputs.bypassed")
def unused_stay_gathered(original: Any, self: Any, reason: Any) -> None:
    """A unit that gets no gradient stays gathered through the step.

    Units were given up when their gradients arrived. One that the loss does not reach kept the weights it had
    gathered, and computed with them in the next iteration.
    """
    rests = self.state is UnitState.UNSHARDED or self.state is UnitState.ACCUMULATING
    if reason is not ReshardReason.AFTER_BACKWARD or self.handle.empty or not rests:
        original(self, reason)
        return
    if self.state is UnitState.UNSHARDED:
        self.life.move(UnitState.ACCUMULATING, self.name)
    self.handle.originals.show_sharded()


@known_bug(
    "B047",
    backward,
    "hook_outputs",
    "pytorch issue 181832, PR 181850",
    "outputs.views_changed_in_place",
    also=UNWATCHED,
    silent=False,
)
def no_hook_on_views(original: Any, unit: Any, output: Any, inputs: Any) -> Any:
    """A view that is changed in place loses the hook that gathers.

    A unit returned a view and its caller added to it in place: autograd rebuilt the node, and the hook that gathers
    for backward was gone with the old one.
    """
    return output if isinstance(output, torch.Tensor) and output._is_view() else original(unit, output, inputs)
