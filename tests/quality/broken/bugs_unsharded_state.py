"""Bugs of what is gathered when, and of what the graph holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from planting import Change, instead, known_bug

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Originals
from fsdp_ref.runtime import backward
from fsdp_ref.runtime.root import Root
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import ReshardReason


@known_bug("B040", Originals, "trainable", "pytorch issue 104148, PR 104186", "frozen.thawed_later")
def decided_once(original: Any, self: Any) -> Any:
    """A unit that was frozen at first never trains.

    What trains was decided once; a unit thawed after some steps kept the hooks of a frozen one and got no gradient.
    """
    return vars(self).setdefault("_trainable_at_first", original(self))


@known_bug("B048", Root, "watch_saved_tensors", "pytorch issue 173709", "outputs.bypassed", silent=False)
def unwatched(original: Any, self: Any) -> Any:
    """A loss through what a unit kept finds freed memory.

    Backward gathers a unit when a gradient of its output arrives. A loss that uses a tensor the unit kept reaches its
    parameters without one.
    """
    return _no_watch(original, self)


def _no_watch(original: Any, self: Any) -> Any:
    return nullcontext()


def thought_watched(original: Any, self: Any) -> bool:
    """Take units for watched that are not, so that they are freed after forward."""
    return True


UNWATCHED: tuple[Change, ...] = (
    (Root, "watch_saved_tensors", instead(_no_watch)),
    (Root, "saves_views", instead(thought_watched)),
)
"""Backward gathers by the hooks on outputs alone."""


@known_bug(
    "B075",
    backward,
    "hook_outputs",
    "pytorch issue 77812",
    "outputs.containers",
    also=UNWATCHED,
    silent=False,
)
def plain_outputs_only(original: Any, unit: Any, output: Any, inputs: Any) -> Any:
    """Units that return dataclasses are not gathered for backward.

    Outputs were searched for tensors in lists, tuples and dicts; a dataclass hid them from the hook.
    """
    return output if hasattr(output, "__dataclass_fields__") else original(unit, output, inputs)


@known_bug("B140", FlatHandle, "start_unshard", "pytorch issue 176076, PR 176225", "sizes.uneven")
def stale_on_last_rank(original: Any, self: Any) -> Any:
    """The rank with the padded shard gathers the weights of the first step.

    A padded copy of an uneven shard was made for the gather once and not again: the rows of the last rank never moved
    in forward, though the optimizer moved them.
    """
    # The last rank's shard is the one with padding, whichever way a layout pads.
    if not self.sharded or self.shard_rank != self.shard_size - 1:
        return original(self)
    current = self.shard_S
    vars(self).setdefault("_padded_once", current.clone())
    self.shard_S = vars(self)["_padded_once"]
    try:
        return original(self)
    finally:
        self.shard_S = current


def dropped_by_nobody(original: Any, self: Any) -> None:
    """Keep what was gathered before parameters changed."""


@known_bug(
    "F001",
    Unit,
    "reshard",
    "docs/findings/unsharded-weights-survive-the-optimizer-step.md",
    "forward_only.eval accumulation.forward_between",
    also=[(Unit, "drop_out_of_date", instead(dropped_by_nobody))],
)
def kept_through_steps(original: Any, self: Any, reason: Any) -> None:
    """Gathered weights survive the optimizer's step.

    A forward that no backward follows leaves units gathered; the next forward after a step computes with the old
    weights. Found by this project in torch's FSDP1 and FSDP2.
    """
    if reason is not ReshardReason.OUT_OF_DATE or not self.handle.sharded:
        original(self, reason)
