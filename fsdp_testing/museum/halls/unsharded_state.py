"""Bugs of what is gathered when, and of what the graph holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Originals
from fsdp_ref.runtime import backward
from fsdp_ref.runtime.root import Root
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import ReshardReason
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _stale_on_last_rank(original: Any, self: Any) -> Any:
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


def _decided_once(original: Any, self: Any) -> Any:
    return vars(self).setdefault("_trainable_at_first", original(self))


def _unwatched(original: Any, self: Any) -> Any:
    return nullcontext()


def _plain_outputs_only(original: Any, unit: Any, output: Any, inputs: Any) -> Any:
    return output if hasattr(output, "__dataclass_fields__") else original(unit, output, inputs)


def _kept_through_steps(original: Any, self: Any, reason: Any) -> None:
    if reason is not ReshardReason.OUT_OF_DATE or self.handle is None or not self.handle.sharded:
        original(self, reason)


EXHIBITS = (
    Exhibit(
        id="B040",
        title="a unit that was frozen at first never trains",
        story="What trains was decided once; a unit thawed after some steps kept the hooks of a frozen one and got no "
        "gradient.",
        source="pytorch issue 104148, PR 104186",
        plant=planting((Originals, "trainable", instead(_decided_once))),
        checks=("frozen.thawed_later",),
    ),
    Exhibit(
        id="B048",
        title="a loss through what a unit kept finds freed memory",
        story="Backward gathers a unit when a gradient of its output arrives. A loss that uses a tensor the unit kept "
        "reaches its parameters without one.",
        source="pytorch issue 173709",
        plant=planting((Root, "watch_saved_tensors", instead(_unwatched))),
        checks=("outputs.bypassed",),
        silent=False,
    ),
    Exhibit(
        id="B075",
        title="units that return dataclasses are not gathered for backward",
        story="Outputs were searched for tensors in lists, tuples and dicts; a dataclass hid them from the hook.",
        source="pytorch issue 77812",
        plant=planting(
            (Root, "watch_saved_tensors", instead(_unwatched)),
            (backward, "hook_outputs", instead(_plain_outputs_only)),
        ),
        checks=("outputs.containers",),
        silent=False,
    ),
    Exhibit(
        id="B140",
        title="the rank with the padded shard gathers the weights of the first step",
        story="A padded copy of an uneven shard was made for the gather once and not again: the rows of the last rank "
        "never moved in forward, though the optimizer moved them.",
        source="pytorch issue 176076, PR 176225",
        plant=planting((FlatHandle, "start_unshard", instead(_stale_on_last_rank))),
        checks=("sizes.uneven",),
    ),
    Exhibit(
        id="F001",
        title="gathered weights survive the optimizer's step",
        story="A forward that no backward follows leaves units gathered; the next forward after a step computes with "
        "the old weights. Found by this project in torch's FSDP1 and FSDP2.",
        source="docs/findings/unsharded-weights-survive-the-optimizer-step.md",
        plant=planting((Unit, "reshard", instead(_kept_through_steps))),
        checks=("forward_only.eval", "accumulation.forward_between"),
    ),
)
