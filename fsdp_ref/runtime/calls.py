"""Open forward calls of units, and how each is closed, whatever way it ends.

A call ends by ``close``, by ``abort`` when it raised, or not at all: torch runs the hooks of the composable API for an
``Exception`` only, so that Ctrl-C leaves the call open. It is noticed at the next use of the tree, because the Python
frame that it ran in has ended, and aborted then (:func:`abort_interrupted`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from fsdp_ref.autograd.graph_hooks import TakenInputs
from fsdp_ref.autograd.graph_ties import PassRecord
from fsdp_ref.compat import RunningCall, uncompiled
from fsdp_ref.handle.writeback import write_back
from fsdp_ref.states import ReshardReason, UnitState

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit


class Visit(Protocol):
    """A use of one unit's full parameters between passes, which may end without being closed."""

    running: RunningCall
    """The call that it lasts for."""

    def close(self) -> None:
        """Keep edits, and release full parameters."""


@dataclass(slots=True, eq=False)
class Frame:
    """One open forward call of a unit.

    Attributes:
        unit: whose.
        root: the root that it runs under.
        nested: the unit was already open: this call only passes through.
        replay: inside a backward pass, for activation checkpointing: giving parameters up is left to backward.
        outermost: the first open call of the tree, outside of backward.
        running: the Python call that it runs in, for calls whose end may go unnoticed.
        resumes: the state that the unit is in when the call has ended.
        cast_back: the dtype that outputs are cast to, asked for or, for units in full precision by exception, that of inputs.
        context: what is undone when the call ends.
        record: the unit's forward pass; kept here until the outputs' hooks keep it.
        inputs: what the unit computes with, cast and moved.
    """

    unit: Unit
    root: Root
    nested: bool
    replay: bool = False
    outermost: bool = False
    running: RunningCall | None = None
    resumes: UnitState = UnitState.UNSHARDED
    cast_back: torch.dtype | None = None
    context: ExitStack = field(default_factory=ExitStack)
    record: PassRecord | None = None
    inputs: TakenInputs = field(default_factory=TakenInputs)

    def compute(self) -> None:
        """The module's forward is about to run; parameters are unsharded."""
        if self.unit.life.state in {UnitState.BACKWARD, UnitState.ACCUMULATING}:
            self.resumes = self.unit.life.state
        self.unit.life.move(UnitState.FORWARD, self.unit.name)


def close(frame: Frame) -> None:
    """The call has ended: the unit is in the state around it, and what was entered for the call is left."""
    unit = frame.unit
    if unit.life.state is UnitState.FORWARD:
        if frame.record is not None:
            # Before the state moves: until then the buffer is this call's own.
            _keep_edits(unit, frame.root, frame.record)
        unit.life.move(frame.resumes, unit.name)
    # A call that was aborted from outside was already removed.
    if frame in frame.root.calls:
        frame.root.calls.remove(frame)
    frame.context.close()


def _keep_edits(unit: Unit, root: Root, record: PassRecord) -> None:
    """Write what forward changed in place to the shard, while the full parameters are still there ([Note: edits in forward])."""
    handle = unit.handle
    edited = record.edited()
    # The shard outlives this pass, which may be an evaluation: what is written to it must be trainable.
    with torch.inference_mode(False), torch.no_grad():
        if edited:
            write_back(handle, edited)
            record.accept_edits()
            handle.versions.count_in_pass(edited)
            handle.streams.gather_after_compute()  # the shard was written to on the current stream just now
            for look_at_edits in root.guards.edits_kept:
                look_at_edits(unit, edited)
        for look in root.guards.unit_ends:
            look(unit)


@uncompiled
def abort(frame: Frame) -> None:
    """The unit's forward raised: put everything back.

    Inside backward this is also how checkpointing stops a forward that it runs again as soon as it has what it needs;
    the parameters are about to be used, so they stay.
    """
    if frame.nested:
        return
    close(frame)
    if frame.replay:
        return
    frame.unit.reshard(ReshardReason.FAILED)
    if frame.outermost:
        # The tree's forward ended here as well: gathers ahead of units that will not run are freed.
        frame.root.end_forward()
        for each in frame.root.units:
            # Tensors that the module stored so far hold the beginning of a graph that backward will never run.
            each.graph.loosen()


def abort_interrupted(root: Root) -> None:
    """Abort calls that ended without their hooks, innermost first."""
    while root.calls and root.calls[-1].running is not None and root.calls[-1].running.ended():
        abort(root.calls[-1])
