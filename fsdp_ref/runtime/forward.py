"""What happens around a unit's forward?

``enter_forward`` gathers, shows tracked views and casts inputs; ``exit_forward`` hooks outputs and gives full parameters
up; ``abort_forward`` does the latter when the user's forward raised. The wrapper calls them around the wrapped module,
the composable API from module hooks.

Inside a backward pass the same calls serve a forward that activation checkpointing runs again: it finds parameters
gathered or gathers them, and leaves giving them up to backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_ref import compat
from fsdp_ref.errors import UnshardConflictError, explain
from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime import backward, prefetch
from fsdp_ref.runtime.events import UnitEventKind
from fsdp_ref.runtime.graph_ties import PassRecord, TakenInputs
from fsdp_ref.runtime.order_check import check_order
from fsdp_ref.runtime.root import Root
from fsdp_ref.runtime.tracked import TrackedParams
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import TrainingState
from fsdp_ref.storage.precision import cast_floating, map_tensors, move_to
from fsdp_ref.storage.views import alias


@dataclass(slots=True)
class Frame:
    """One open forward call of a unit.

    Attributes:
        unit: whose.
        nested: the unit was already open: this call only passes through.
        outermost: the first open call of the tree, outside of backward.
        cast_back: the dtype that outputs are cast back to, for units that compute in full precision by exception.
        context: what is undone when the call ends.
        record: the unit's forward pass; held here until the outputs' hooks hold it.
        inputs: what the unit computes with, cast and moved.
    """

    unit: Unit
    nested: bool
    outermost: bool = False
    cast_back: torch.dtype | None = None
    context: ExitStack = field(default_factory=ExitStack)
    record: PassRecord | None = None
    inputs: TakenInputs = field(default_factory=TakenInputs)


def lazy_init(unit: Unit) -> Root:
    """Return the unit's root, making the unit itself the root when it has none yet."""
    if unit.root is None:
        Root(unit, backward.end_backward, backward.demand)
    assert unit.root is not None  # a root adopts its units
    return unit.root


def enter_forward(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Frame, Any, Any]:
    """Prepare the unit's forward; return its frame and the inputs to use.

    Collectives:
        An all-gather over the shard group unless parameters are there; maybe the next unit's. All ranks must call.
    """
    root = lazy_init(unit)
    if unit.training_state is TrainingState.SUMMON_FULL_PARAMS:
        raise UnshardConflictError(
            explain(
                f"forward of {unit!r}",
                expected="sharded parameters",
                got="full parameters held by summon_full_params",
                remedy="Expects tensor to be unsharded by forward itself; leave the context first",
            )
        )
    if unit.depth:
        unit.open_call()
        return Frame(unit, nested=True), args, kwargs
    replay = compat.in_backward()
    frame = Frame(unit, nested=False, outermost=not replay and root.open_forwards == 0)
    if not replay:
        root.open_call()
    unit.open_call()
    try:
        if frame.outermost:
            root.begin_forward()
            frame.context.enter_context(root.watch_saved_tensors())
        args, kwargs = _inputs(unit, frame, args, kwargs)
        frame.inputs = TakenInputs(args, kwargs)
        _gather(unit, root, frame, replay=replay)
        if not replay:
            backward.reshard_with_inputs(unit, (args, kwargs))
    except BaseException:
        abort_forward(frame)
        raise
    return frame, args, kwargs


def _gather(unit: Unit, root: Root, frame: Frame, *, replay: bool) -> None:
    """Have full parameters and show tracked views of them."""
    unit.begin_forward()
    unit.note(UnitEventKind.PRE_FORWARD)
    _set_precision(unit)
    handle = unit.handle
    if not replay:
        root.order.pre_forward(root.index[unit])
        check_order(root, unit)
    if handle is None:
        return
    if not handle.unsharded or not replay:
        handle.grads.absorb()
    if absorb_params(handle) and unit.keep_unsharded:
        unit.drop()
    unit.unshard()
    root.owned(unit)
    if not replay:
        prefetch.in_forward(root, unit)
    frame.record = tracked_views(unit, root)
    if not replay:
        root.keep_open(frame.record)
    handle.originals.show_computing(frame.record.views)


def _set_precision(unit: Unit) -> None:
    """Follow train() and eval() where evaluation in full precision is switched on."""
    if not unit.config.switches.full_precision_in_eval:
        return
    if unit.handle is not None:
        unit.handle.set_full_precision(unit.full_precision_now)
    if unit.full_precision_now:
        unit.buffers.restore()
    else:
        unit.buffers.lower()


def tracked_views(unit: Unit, root: Root) -> PassRecord:
    """Return this forward pass with its views: one set per pass, so that backward completes once however often it runs."""
    handle = unit.handle
    assert handle is not None  # only units with parameters have views
    tracked = torch.is_grad_enabled() and any(handle.originals.trainable())
    known = unit.graph.record
    if known is not None and known.round == root.round and known.tracked == tracked:
        return known
    if tracked:
        views = list(compat.apply_function(TrackedParams, root.anchor, unit, backward.on_gradients))
    else:
        views = [alias(view) for view in handle.compute_views()]
    record = PassRecord(views, root.round, tracked=tracked)
    unit.graph.remember(record)
    return record


def _inputs(unit: Unit, frame: Frame, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move and cast inputs as the unit's settings ask."""
    if frame.outermost and unit.config.device.type != "cpu":
        args, kwargs = move_to(args, unit.config.device), move_to(kwargs, unit.config.device)
    if unit.config.full_precision_module:
        frame.cast_back = _first_floating(args, kwargs)
        dtype: torch.dtype | None = torch.float32 if unit.handle is None else unit.handle.precision.original
    else:
        policy = unit.config.mixed_precision
        as_root = policy.cast_root_forward_inputs and (unit.is_root or unit.config.applied_here)
        dtype = unit.input_dtype if policy.cast_forward_inputs or as_root else None
    if dtype is None:
        return args, kwargs
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def _first_floating(*values: Any) -> torch.dtype | None:
    found: list[torch.dtype] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor.dtype)
        return tensor

    map_tensors(values, look)
    return found[0] if found else None


def exit_forward(frame: Frame, output: Any) -> Any:
    """Finish the unit's forward; return the output to hand on."""
    unit = frame.unit
    if frame.nested:
        unit.close_call()
        return output
    root = lazy_init(unit)
    try:
        if frame.cast_back is not None:
            output = cast_floating(output, frame.cast_back)
        output = backward.hook_outputs(unit, output, frame.inputs)
    except BaseException:
        abort_forward(frame)
        raise
    _close(frame)
    if not compat.in_backward():
        root.order.post_forward(root.index[unit])
        _give_up(unit)
        if frame.outermost:
            if unit.is_root:
                root.order.end_forward()
            root.end_forward()
    unit.note(UnitEventKind.POST_FORWARD)
    return output


def abort_forward(frame: Frame) -> None:
    """The unit's forward raised: put everything back.

    Inside backward this is also how checkpointing stops a forward that it runs again as soon as it has what it needs;
    the parameters are about to be used, so they stay.
    """
    unit = frame.unit
    if frame.nested:
        unit.close_call()
        return
    _close(frame)
    if not compat.in_backward():
        unit.drop()
        if frame.outermost:
            root = lazy_init(unit)
            root.end_forward()
            for each in root.units:
                # What the module stored on its way here holds the beginning of a graph that nobody will run backward.
                each.graph.loosen()


def _close(frame: Frame) -> None:
    unit = frame.unit
    unit.close_call()
    if unit.root is not None and not compat.in_backward():
        unit.root.close_call()
    frame.context.close()


def _give_up(unit: Unit) -> None:
    """Reshard after forward as the strategy says."""
    handle = unit.handle
    if handle is None:
        return
    # Where no output can be differentiated no backward will come that frees (one that enters elsewhere gathers anew).
    for_good = not torch.is_grad_enabled() or not unit.needs_pre_backward
    free = for_good or (unit.config.reshards_after_forward and not unit.is_root)
    unit.reshard(free=free and handle.needs_buffer and not _kept(unit))
    keeps_full = handle.unsharded and handle.sharded and not unit.config.reshards_after_forward
    # Shown in full only while no gradient of the shard is there: an optimizer step must find matching shapes.
    if keeps_full and unit.config.use_orig_params and all(param.grad is None for param in handle.originals.params):
        handle.originals.show_full()


def _kept(unit: Unit) -> bool:
    return unit.keep_unsharded and torch.is_grad_enabled()


def call_unit(unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` as the unit's forward."""
    frame, args, kwargs = enter_forward(unit, args, kwargs)
    try:
        output = forward(*args, **kwargs)
    except BaseException:
        abort_forward(frame)
        raise
    return exit_forward(frame, output)
