"""Before, after and at the end of a unit's backward.

*Pre-backward* (a hook on each output, or the first saved parameter that backward asks for): gather, show views for
forwards that checkpointing runs again, gather ahead. *Post-backward* (the unit's node in the graph, see ``tracked``):
all gradients have arrived; release parameters and reduce. *End* (once per outermost pass): wait for reductions, release the
remaining parameters, publish gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_ref.autograd.graph_hooks import InputsWatch, TakenInputs, with_base
from fsdp_ref.compat import labelled, storage_key, uncompiled, waited
from fsdp_ref.config import BackwardPrefetch
from fsdp_ref.errors import UnshardConflictError
from fsdp_ref.handle.accumulated import dense
from fsdp_ref.handle.param_hooks import put_back, run_after_accumulation, run_tensor_hooks, set_aside
from fsdp_ref.handle.writeback import absorb_params, check_unchanged
from fsdp_ref.runtime import prefetch
from fsdp_ref.runtime.events import UnitEventKind
from fsdp_ref.runtime.unit import Ahead, Unit
from fsdp_ref.states import READABLE, ReshardReason, UnitState
from fsdp_ref.storage.precision import map_tensors, tensors_in
from fsdp_ref.storage.views import alias

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_ties import GraphTie, PassRecord
    from fsdp_ref.runtime.root import Root

# ---------------------------------------------------------------------- pre-backward


def hook_outputs(unit: Unit, output: Any, inputs: TakenInputs) -> Any:
    """Register the pre-backward hook on every output tensor that the unit made and that requires grad.

    The gradient of an input that the unit returns unchanged arrives only after all of the unit's backward that uses it: it
    begins nothing. Nor does a leaf's, which may be the same tensor in every step.

    What a view is a view of has the hook too: a caller who changes the view in place gives it another node, and the hook
    on the old one would never run.
    """
    if not torch.is_grad_enabled():
        return output
    tie, record = unit.graph.tie(), unit.graph.record
    # The graph keeps the hook, the hook keeps the record with the views of the pass, as long as both are needed.
    waiting = partial(_output_reached, tie, record)
    # Those views lead to the unit's own node: a hook there that kept them would keep the node, for ever.
    on_node = partial(_output_reached, tie, None)

    def hook(tensor: Tensor) -> Tensor:
        for made in with_base(tensor) if tensor.requires_grad else ():
            if made.requires_grad and not made.is_leaf and not inputs.gives_back(made):
                made.register_hook(on_node if record is not None and record.leads_to(made) else waiting)
                unit.awaits_backward = True
        return tensor

    return map_tensors(output, hook)


@uncompiled
def _output_reached(tie: GraphTie, _: PassRecord | None, grad: Tensor) -> None:
    """The gradient of an output has arrived: the unit's backward begins (once, however many outputs it has).

    Collectives:
        An all-gather over the shard group unless parameters are unsharded; sometimes another unit's too. All ranks must
        call.
    """
    begin_backward(tie.unit())


@uncompiled
def begin_backward(unit: Unit) -> None:
    """Begin the unit's backward, unless it has begun.

    Collectives:
        Those of ``_output_reached``.
    """
    root = unit.root
    assert root is not None  # the unit ran forward
    task = root.enter_backward()
    flush_partial(root, unit, task)
    if unit.life.state is not UnitState.BACKWARD:
        _enter(root, unit, task)


@uncompiled
def demand(unit: Unit) -> None:
    """Backward reads a sharded parameter of ``unit``: gather it, wherever backward is."""
    root = unit.root
    assert root is not None  # the unit ran forward
    _enter(root, unit, root.enter_backward())


def _enter(root: Root, unit: Unit, task: int) -> None:
    if unit.life.state is UnitState.SUMMONED:
        # Modules show a user's buffer then, which this pass did not compute with.
        raise UnshardConflictError(
            f"backward of {unit!r}: expected sharded parameters, got full parameters that summon_full_params shows. Run "
            "backward outside of the context."
        )
    root.in_pass[unit] = None  # its gradients are shown when the pass ends, also if none arrives
    if unit.life.state is UnitState.FORWARD:
        return  # a backward inside the unit's own forward, whose parameters are there and stay
    with labelled("pre_backward", unit.name):
        unit.note(UnitEventKind.PRE_BACKWARD)
        handle = unit.handle
        if unit.life.state in READABLE:
            check_unchanged(handle)
        # A prefetch has read the shard already: what were taken over now, the gathered values would not have.
        elif unit.ahead is not Ahead.PREFETCH:
            absorb_params(handle)
        unit.drop_out_of_date()
        unit.unshard()
        if not handle.empty:
            root.owned(unit)
            # Not for autograd, which makes its own views: for a forward that checkpointing runs again in here.
            # The views of the forward pass while its record lives: what runs again must lead to the node that is there, for a
            # second one would reduce a second time.
            record = unit.graph.gradient_record
            # Evaluation in another precision since then fills another buffer.
            if record is not None and storage_key(record.aliases[0]) != storage_key(handle.full_F()):
                record = None
            views = [alias(view) for view in handle.compute_views()] if record is None else record.views
            handle.originals.show_computing(
                handle.originals.unflattened(views) if record is None else unit.computing(views)
            )
        unit.life.move(UnitState.BACKWARD, unit.name)
        unit.backward_task = task
        prefetch.in_backward(root, unit, BackwardPrefetch.BACKWARD_PRE)


def reshard_with_inputs(unit: Unit, inputs: Any) -> None:
    """For a unit that trains nothing: release parameters once the gradients of its inputs have arrived.

    It has no node in the graph that could say so. When backward does not reach all of them, its end says so.
    """
    handle, record = unit.handle, unit.graph.record
    if record is None or not torch.is_grad_enabled() or any(handle.originals.trainable()):
        return
    # A unit without such inputs is reached by no gradient: nothing gathers it in backward.
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if tensors:
        record.watch = InputsWatch(unit.graph.tie(), tensors, _frozen_done)


@uncompiled
def _frozen_done(unit: Unit) -> None:
    root = unit.root
    assert root is not None  # the unit ran forward
    root.enter_backward()
    root.in_pass[unit] = None
    # No gradients to reduce: only the order (free, then gather) is that of a unit that trains.
    unit.reshard(ReshardReason.AFTER_BACKWARD)
    prefetch.in_backward(root, unit, BackwardPrefetch.BACKWARD_POST)


# ---------------------------------------------------------------------- post-backward


@uncompiled
def on_gradients(unit: Unit, grads: tuple[Tensor | None, ...]) -> None:
    """All gradients of this graph for the parameters of ``unit`` have arrived.

    Collectives:
        When synchronising, those of ``GradSync.reduce``. All ranks must call.
    """
    root = unit.root
    assert root is not None  # the unit ran forward
    task = root.enter_backward()
    handle = unit.handle
    put_back(handle)  # users' hooks may have gone aside: a pass through several graphs comes here for each
    unused = all(grad is None for grad in grads)
    local = [None if grad is None else dense(waited(grad)).detach() for grad in grads]
    if not unused:
        local = run_tensor_hooks(handle, local)
    # Before the engine goes on to the leaves, where it would run them again.
    set_aside(handle)
    if unused:
        return
    root.in_pass[unit] = None
    if unit.life.state is UnitState.BACKWARD and unit.backward_task != task:
        # A pass inside the pass (reentrant checkpointing): other regions of the unit may follow. Keep it open.
        # Local until backward moves on to another unit (``flush_partial``): all regions are reduced at once.
        # An ordered set: what is completed later is reduced in the order of backward, alike on all ranks.
        root.partial[unit] = None
        root.sync.accumulate(unit, local)
        return
    root.partial.pop(unit, None)
    _complete(root, unit, local)


def _complete(root: Root, unit: Unit, local: list[Tensor | None]) -> None:
    with labelled("post_backward", unit.name):
        unit.note(UnitEventKind.POST_BACKWARD)
        # First, so that the next gather and the reduction find the memory of this unit's parameters free.
        unit.reshard(ReshardReason.AFTER_BACKWARD)
        # Then the gather, which backward waits for next; the reduction is not awaited before the pass ends.
        prefetch.in_backward(root, unit, BackwardPrefetch.BACKWARD_POST)
        if unit.sync_gradients:
            root.sync.reduce(unit, local)
        else:
            root.sync.accumulate(unit, local)


def flush_partial(root: Root, entering: Unit, task: int) -> None:
    """Complete units whose gradients came from passes inside this one, now that backward moves on to another unit."""
    for unit in [unit for unit in root.partial if unit is not entering and unit.backward_task == task]:
        encloses = unit.is_root or not unit.name or entering.name.startswith(unit.name + ".")
        if not encloses:
            root.partial.pop(unit)
            _complete(root, unit, _nothing_new(unit))


def _nothing_new(unit: Unit) -> list[Tensor | None]:
    return [None] * len(unit.handle.originals.params)


# ---------------------------------------------------------------------- end


@uncompiled
def end_backward(root: Root) -> None:
    """The outermost backward pass ended: nothing of it stays in flight, and users see its gradients."""
    with labelled("end_of_backward", root.unit.name):
        for unit in list(root.partial):
            root.partial.pop(unit)
            _complete(root, unit, _nothing_new(unit))
        # Before ranks compare what they sent: these reductions are issued in the order of units, alike everywhere.
        _reduce_leftovers(root)
        for look in root.guards.reductions_issued:
            look()
        # The rest of what is in flight: a user may read gradients as soon as backward returns.
        root.sync.finish()
        # From here on the current stream, on which the optimizer runs, sees reduced gradients.
        root.streams.compute_after_reduce()
        if root.offloads:
            # Nothing else stops the host, which may run ahead into the next step; offloaded gradients it reads itself.
            root.streams.host_after_copies()
        for unit in root.units:
            # What a backward without synchronisation kept is freed by the next one with it, used there or not.
            if unit.life.state is UnitState.ACCUMULATING and not (unit.sync_gradients and unit.reshards_after_backward):
                unit.end_pass()
            else:
                unit.reshard(ReshardReason.AFTER_BACKWARD)
        root.streams.free_rest()
        for look in root.guards.gradients_ready:
            look()
        # Last: users' hooks run in here, which may save, clip or run forward; they find no unit busy and nothing in flight.
        publish(root.in_pass)
        root.in_pass.clear()


def _reduce_leftovers(root: Root) -> None:
    """Reduce what no_sync left in units that this synchronising pass did not use.

    A unit may have been used only in the first micro-batches of an accumulation; it would never be reduced later.

    Collectives:
        Those of ``GradSync.reduce``, in the order of units; ranks agree, because gathers in forward made them agree.
    """
    for unit in root.units:
        handle = unit.handle
        if not unit.sync_gradients or handle.grads.local_F is None:
            continue
        # Users may have cleared what no_sync left: then there is nothing to reduce, on every rank that did so.
        handle.grads.absorb()
        if handle.grads.local_F is not None:
            root.in_pass[unit] = None
            root.sync.reduce(unit, _nothing_new(unit))


def publish(units: Iterable[Unit]) -> None:
    """Hand gradients to users, then run what users attached to them."""
    handles = [unit.handle for unit in units]
    for handle in handles:
        handle.grads.publish()
    # After all are shown: a user's hook may look at other parameters, or step an optimizer over several.
    for handle in handles:
        if handle.grads.local_F is None:
            run_after_accumulation(handle)
