"""Before and after a unit's forward.

``enter_forward`` gathers, shows tracked views and casts inputs; ``exit_forward`` hooks outputs and gives full parameters
up; ``calls.abort`` does the latter when the user's forward raised. The wrapper calls them around the wrapped module,
the composable API from module hooks.

Inside a backward pass the same calls serve a forward that activation checkpointing runs again: it finds parameters
gathered or gathers them, and leaves giving them up to backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fsdp_ref import compat
from fsdp_ref.autograd.graph_hooks import TakenInputs
from fsdp_ref.autograd.graph_ties import PassRecord
from fsdp_ref.autograd.tracked import TrackedParams
from fsdp_ref.compat import RunningCall, labelled, uncompiled
from fsdp_ref.errors import UnshardConflictError
from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime import backward, calls, prefetch
from fsdp_ref.runtime.calls import Frame
from fsdp_ref.runtime.events import UnitEventKind
from fsdp_ref.runtime.root import Root, lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import READABLE, ReshardReason, UnitState
from fsdp_ref.storage.precision import cast_floating, map_tensors, move_to, tensors_in
from fsdp_ref.storage.views import alias


@uncompiled
def enter_forward(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], running: RunningCall | None = None
) -> tuple[Frame, Any, Any]:
    """Prepare the unit's forward; return its frame and the inputs to use.

    ``running`` is the Python call that the forward belongs to, where its end may go unnoticed (see ``calls``).

    Collectives:
        An all-gather over the shard group unless parameters are unsharded; sometimes the next unit's too. All ranks
        must call.
    """
    root = lazy_init(unit)
    if unit.life.state is UnitState.SUMMONED:
        raise UnshardConflictError(
            f"forward of {unit!r}: expected sharded parameters, got full ones, since summon_full_params is open. "
            "Expects tensor to be unsharded by forward itself: leave the context first."
        )
    # A module that calls itself: parameters are there, and the outer call gives them up.
    if unit.life.state is UnitState.FORWARD:
        return Frame(unit, root, nested=True, running=running), args, kwargs
    replay = compat.in_backward()
    frame = Frame(unit, root, nested=False, replay=replay, outermost=not replay and not root.calls, running=running)
    root.calls.append(frame)  # from here on whatever raises has to be undone by ``calls.abort``
    try:
        with labelled("pre_forward", unit.name):
            if frame.outermost:
                root.begin_forward()
                frame.context.enter_context(root.watch_saved_tensors())
            args, kwargs = _inputs(unit, frame, args, kwargs)
            # After the casts: an output may be an input as the module got it.
            frame.inputs = TakenInputs(args, kwargs)
            _gather(unit, root, frame)
            if not replay:
                backward.reshard_with_inputs(unit, (args, kwargs))
    except BaseException:
        calls.abort(frame)
        raise
    return frame, args, kwargs


def _gather(unit: Unit, root: Root, frame: Frame) -> None:
    """Have full parameters and show tracked views of them."""
    unit.note(UnitEventKind.PRE_FORWARD)
    _set_precision(unit)
    handle = unit.handle
    # What checkpointing runs again in backward is no step of forward: it would shift what comes next.
    if not frame.replay:
        root.order.pre_forward(root.index[unit])
        # Before this unit's gather: a rank that goes another way is named while the others can still hear it.
        for look in root.guards.unit_begins:
            look(unit)
    if not frame.replay or unit.life.state not in READABLE:
        # What users did to gradients since they were shown is read before this pass adds to them.
        handle.grads.absorb()
    if absorb_params(handle) and unit.life.state is UnitState.ACCUMULATING:
        unit.reshard(ReshardReason.OUT_OF_DATE)
    unit.drop_out_of_date()
    unit.unshard()
    if not handle.empty:
        # After the gather, which may have changed the dtype and so the buffer; before modules compute, and autograd saves views.
        root.owned(unit)
        if not frame.replay:
            # After the own gather, so that the next one queues behind it and runs while this unit computes.
            prefetch.in_forward(root, unit)
        # A unit that runs twice in a forward shows one set of views, hence has one node and one completion.
        frame.record = tracked_views(unit, root)
        if not frame.replay:
            # Nothing else holds the record until outputs have their hooks, and the graph side knows it weakly.
            root.open_records.append(frame.record)
        handle.originals.show_computing(unit.computing(frame.record.views) if frame.replay else frame.record.views)
    frame.compute()


def _set_precision(unit: Unit) -> None:
    """Follow train() and eval() where evaluation in full precision is switched on."""
    if not unit.config.full_precision_in_eval:
        return
    # Before the gather, which fills the buffer of one dtype.
    unit.handle.set_full_precision(unit.full_precision_now)
    if unit.full_precision_now:
        unit.buffers.restore()
    else:
        unit.buffers.lower()


def tracked_views(unit: Unit, root: Root) -> PassRecord:
    """Return this forward pass with its views: one set per pass, so that backward completes once however often it runs."""
    handle = unit.handle
    tracked = torch.is_grad_enabled() and any(handle.originals.trainable())
    known = unit.graph.record
    if known is not None and known.round == root.round and known.tracked == tracked:
        return known
    handle.versions.new_pass()
    if tracked:
        held = handle.originals.held
        tracker: Callable[..., tuple[Tensor, ...]] = TrackedParams.apply  # torch leaves it untyped
        views = list(tracker(root.anchor, unit, backward.on_gradients, *held))
    else:
        views = [alias(view) for view in handle.compute_views()]
    record = PassRecord(handle.originals.unflattened(views), views, root.round, tracked=tracked)
    unit.graph.remember(record)
    return record


def _inputs(unit: Unit, frame: Frame, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move and cast inputs as the unit's settings ask."""
    if frame.outermost and unit.config.device.type != "cpu":
        args, kwargs = move_to(args, unit.config.device), move_to(kwargs, unit.config.device)
    if unit.config.full_precision_module:
        frame.cast_back = next((t.dtype for t in tensors_in(args, kwargs) if t.is_floating_point()), None)
        dtype: torch.dtype | None = unit.handle.precision.original
    else:
        frame.cast_back = unit.config.output_dtype
        policy = unit.config.mixed_precision
        as_root = policy.cast_root_forward_inputs and (unit.is_root or unit.config.applied_here)
        casts = (policy.cast_forward_inputs or as_root) and not unit.full_precision_now
        dtype = policy.param_dtype if casts else None
    # The very objects that came: a user may compare them.
    if dtype is None:
        return args, kwargs
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


@uncompiled
def exit_forward(frame: Frame, output: Any) -> Any:
    """Finish the unit's forward; return the output to hand on."""
    unit, root = frame.unit, frame.root
    if frame.nested:
        return output
    with labelled("post_forward", unit.name):
        try:
            if frame.cast_back is not None:
                output = cast_floating(output, frame.cast_back)
            output = _own_memory(frame, output)
            # Before parameters go: whether an output awaits backward decides whether they go for good.
            output = backward.hook_outputs(unit, output, frame.inputs)
            if frame.record is not None:
                for look in root.guards.unit_computed:
                    look(unit, frame.record)
        except BaseException:
            calls.abort(frame)
            raise
        # Hooks other than ours were in force: autograd holds views, and only the end of backward knows that they are unused.
        unit.unguarded = frame.record is not None and frame.record.tracked and not root.saves_views()
        # Edits are kept in here, from the buffer that the next lines may free.
        calls.close(frame)
        if not frame.replay:
            # After ``close``: what checkpointing runs again has no place in the order that backward walks.
            root.order.post_forward(root.index[unit])
            unit.reshard(ReshardReason.AFTER_FORWARD)
            if frame.outermost:
                if unit.is_root:
                    root.order.end_forward()
                root.end_forward()
        unit.note(UnitEventKind.POST_FORWARD)
    return output


def _own_memory(frame: Frame, output: Any) -> Any:
    """Copy what the unit returns of its parameters (a tied table, a slice): their buffer is freed when forward ends."""
    handle = frame.unit.handle
    if frame.record is None or not handle.needs_buffer:
        return output
    key = handle.buffer(handle.compute_dtype).key

    def copied(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and type(tensor) in {Tensor, Parameter}
        return tensor.clone() if plain and compat.storage_key(tensor) == key else tensor

    return map_tensors(output, copied)


def call_unit(unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` as the unit's forward."""
    frame, args, kwargs = enter_forward(unit, args, kwargs)
    try:
        output = forward(*args, **kwargs)
    except BaseException:
        calls.abort(frame)
        raise
    return exit_forward(frame, output)
