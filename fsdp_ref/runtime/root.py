"""What the units of one tree share.

The unit whose forward is entered first becomes the root (:func:`lazy_init`, at first use). It lists its units, gives
them one set of streams and one execution order, and keeps what lasts for one forward or backward pass of the whole tree.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from fsdp_ref import compat
from fsdp_ref.annotations import units_under
from fsdp_ref.autograd.graph_ties import GraphTie, PassRecord
from fsdp_ref.autograd.tracked import UnitsByStorage, pack_with, unpack_with
from fsdp_ref.comm.streams import refuse_capture, streams_for
from fsdp_ref.errors import FsdpAssertionError, FsdpValueError, TrainingStateError, listing
from fsdp_ref.handle.param_hooks import put_back
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.runtime import backward
from fsdp_ref.runtime.calls import Frame, Visit, abort_interrupted
from fsdp_ref.runtime.execution_order import ExecutionOrder
from fsdp_ref.runtime.grad_sync import GradSync
from fsdp_ref.runtime.guards import TREE_GUARDS, Guards
from fsdp_ref.runtime.unit import Ahead, Unit
from fsdp_ref.states import ReshardReason, TrainingState, UnitState


def lazy_init(unit: Unit) -> Root:
    """Return the unit's root, making the unit itself the root when it has none yet."""
    close_ended(unit)
    if unit.root is None:
        Root(unit)
    assert unit.root is not None  # a root adopts its units
    return unit.root


def close_ended(unit: Unit) -> None:
    """Close what an exception left open because torch skipped our hook: forward calls, and states being collected."""
    root = unit.root
    if root is None:
        return
    abort_interrupted(root)
    for each, visit in list(root.visits.items()):
        if visit.running.ended():
            del root.visits[each]
            visit.close()


_ENDING = threading.RLock()
"""Held while a failed pass is cleaned up: by autograd's device thread, or by the next user of the units."""


class _PassEnd:
    """Runs when one backward pass ends; dies with a pass that fails, which is how failed passes are noticed."""

    def __init__(self, root: Root, task: int) -> None:
        self._root = root
        self._task = task
        self._ended = False

    def __call__(self) -> None:
        self._ended = True
        self._root.leave_backward(self._task)

    def __del__(self) -> None:
        if not self._ended:
            self._root.backward_failed(self._task)


class Root:
    """Shared state of the units below one root.

    Args:
        unit: the root unit.

    Attributes:
        units: all units, depth first.
        order: execution order.
        sync: open gradient reductions.
        guards: what looks for mistakes of users (see ``guards``).
        round: counts outermost forward passes.
        calls: forward calls that are open now, outermost first.
        visits: units whose full parameters are read or written between passes (to collect a state), with how that ends.
        in_pass: units that took part in the current backward pass.
        open_records: forwards of units, kept until the forward of the whole tree ends; later the graph keeps them.
        partial: units whose gradients came from passes inside the current one, which may bring more.
        offloads: whether gradients of some unit are copied to the host.
        tensor_group: ranks with other parts of the same parameters (tensor parallelism); None without.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.units: list[Unit] = []
        self.index: dict[Unit, int] = {}
        self.order = ExecutionOrder()
        self.sync = GradSync()
        self.round = 0
        self.calls: list[Frame] = []
        self.visits: dict[Unit, Visit] = {}
        self.in_pass: dict[Unit, None] = {}
        self.partial: dict[Unit, None] = {}
        # What makes autograd keep the node of a unit's views, whose inputs are no tensors. It gets no gradient.
        with torch.inference_mode(False):  # the first forward may be an evaluation
            self.anchor = torch.zeros((), device=unit.config.device, requires_grad=True)
            self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.streams = streams_for(unit.config.device, limit_all_gathers=unit.config.limit_all_gathers)
        self._passes: dict[int, weakref.ref[_PassEnd]] = {}
        self._creates_graph = False
        self._dirty = False  # a backward pass began and did not reach its end
        self._ties: dict[GraphTie, None] = {}
        self.open_records: list[PassRecord] = []
        self._storages = UnitsByStorage()
        self._pack = pack_with(self._storages)
        self._unpack = unpack_with(backward.demand)
        self._adopt(unit)

    # ------------------------------------------------------------------ members

    def _adopt(self, root_unit: Unit) -> None:
        found = units_under(root_unit.holder)
        units = list(dict.fromkeys(unit for _, _, unit in found))
        if root_unit not in units:  # a unit inside a subtree that belongs to another parallelism
            units = [root_unit]
        others = [unit for unit in units if unit is not root_unit and unit.is_root]
        if others:
            raise FsdpAssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`: "
                "expected the outermost unit to run first, got roots already at "
                f"{listing(unit.name or type(unit.module).__name__ for unit in others)}. Run, summon or clip through "
                "the outermost unit before any unit inside it."
            )
        check_homogeneous(units)
        # Reversed, so that of several paths to a unit the first one names it.
        names = {id(unit): clean_tensor_name(name) for name, _, unit in reversed(found)}
        self.units = units
        self.offloads = any(unit.config.cpu_offload.offload_params for unit in units)
        self.tensor_group = next((axis for axis in _tensor_groups(units) if axis is not None), None)
        for position, unit in enumerate(units):
            # Each is told its place before any gathers: collectives and messages carry the name.
            unit.adopt(self, names.get(id(unit), ""), is_root=unit is root_unit)
            self.index[unit] = position
        # Last: a guard may look at the units, their order and their groups.
        self.guards = Guards([make(self) for make in TREE_GUARDS])

    def disband(self) -> None:
        """Forget that the units belong together: the next use decides anew which unit is the root."""
        # The streams stay with the handles until the next root gives them its own.
        for unit in self.units:
            unit.leave()

    def owned(self, unit: Unit) -> None:
        """Let saved views of the unit's current buffer be recognised (see [Note: saved parameters])."""
        handle = unit.handle
        # By storage and not by object: a buffer keeps its storage when it is freed, so the entry is right in every later pass.
        key = handle.buffer(handle.compute_dtype).key if handle.needs_buffer else compat.storage_key(handle.shard_S)
        self._storages[key] = unit

    # ------------------------------------------------------------------ forward passes

    def begin_forward(self) -> None:
        """The outermost forward call of this tree begins, outside of any backward."""
        refuse_capture(self.unit.config.device)
        # Before anything is gathered: what a failed backward left in flight would pair with this pass's collectives.
        self.recover()
        for look in (*self.guards.forward_begins, *self.guards.tree_used):
            look()
        for unit in self.units:
            # Before the first gather of the pass, which finds the memory of gradients that users dropped free.
            unit.handle.grads.release()
            if unit.ahead is Ahead.USER:
                continue
            if unit.life.state is not UnitState.SHARDED and unit.life.state is not UnitState.ACCUMULATING:
                unit.reshard(ReshardReason.OUT_OF_DATE)
            unit.ahead = None
            unit.end_pass()
            # A tie for each forward: a backward through the graph of the last one must not loosen this one's.
            unit.graph.new_round()
        self.round += 1
        self.order.begin_forward()
        # The optimizer's step runs on the current stream and may not have ended on the device.
        self.streams.gather_after_compute()

    def watch_saved_tensors(self) -> AbstractContextManager[object]:
        """Return the context in which saved views of parameters are packed; other saved-tensor hooks have precedence.

        Hooks do not nest (the innermost pair serves alone), and checkpointing or offloading of activations must see
        every tensor: under such hooks the units rely on the pre-backward hooks of their outputs.
        """
        if compat.saved_tensor_hooks() is not None or not compat.saved_tensor_hooks_allowed():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def saves_views(self) -> bool:
        """Return whether :meth:`watch_saved_tensors` packs the tensors that autograd saves now, and not other hooks."""
        hooks = compat.saved_tensor_hooks()
        return hooks is not None and hooks[0] is self._pack

    def end_forward(self) -> None:
        """The outermost forward call ended: free unused gathers. The graph now keeps what it needs."""
        # Outputs have their hooks, which keep the records from here on; a graph that is dropped drops them.
        self.open_records.clear()
        for unit in self.units:
            if unit.life.state is UnitState.GATHERING and unit.ahead is not Ahead.USER:
                unit.reshard(ReshardReason.UNUSED)
        # What waits for the next gather to free it would wait as long as the user makes none.
        self.streams.free_rest()
        if self.offloads:
            # Shards on the host are read by the device when it gets there. No backward may follow in which the host
            # waits, and the optimizer that runs on the host would write to them before.
            self.streams.host_after_copies()

    # ------------------------------------------------------------------ backward passes

    def enter_backward(self) -> int:
        """Be called back at the end of the backward pass that runs now; return its number.

        Autograd enables gradients inside of a pass for ``create_graph`` alone. Checkpointing enables them, too, in what it runs
        again; that is taken for such a pass.
        """
        # By the number of autograd's task: the passes that reentrant checkpointing runs inside of this one have their own, and
        # what a dead pass left under its number must not be taken for this one's (its weak reference is empty by then).
        task = compat.graph_task_id()
        if task not in self._passes or self._passes[task]() is None:
            if not self._live_passes():
                self.recover()
                self._creates_graph = False
            # Autograd alone keeps it: it drops the callbacks of a pass that fails, and that is how we hear of it.
            end = _PassEnd(self, task)
            self._passes[task] = weakref.ref(end)
            compat.queue_backward_callback(end)
            # Until its end is reached: an exception, Ctrl-C included, leaves this set, and the next use cleans
            # up.
            self._dirty = True
        # Never taken back within a pass: a function of the user's may read what it saved under ``no_grad``.
        self._creates_graph |= torch.is_grad_enabled()
        return task

    @property
    def creates_graph(self) -> bool:
        """Whether the backward pass that runs now may make a graph of its own.

        Of the tree, not of a unit: what checkpointing runs again may begin with the gradient of a layer behind a unit, whose own
        output has none yet. Before any output of the tree has one nothing is known, and a graph is assumed.
        """
        return self._creates_graph or not self._live_passes()

    def _live_passes(self) -> list[int]:
        self._passes = {task: end for task, end in self._passes.items() if end() is not None}
        return list(self._passes)

    def leave_backward(self, task: int) -> None:
        """A backward pass ended; the outermost one (that touched units) ends backward for the tree."""
        self._passes.pop(task, None)
        # Checkpointing runs passes inside the pass; nothing is complete before the outermost one ends.
        if self._live_passes():
            return
        # First: the end of backward runs users' hooks after accumulation, and looks for them where users put them.
        self._put_hooks_back()
        try:
            backward.end_backward(self)
        except BaseException:
            self.backward_failed(task)
            raise
        self._dirty = False
        self._loosen()

    def backward_failed(self, task: int) -> None:
        """A backward pass died of an exception: users see parameters, and the gradients that were complete, at once.

        Work that waits for other ranks is left to :meth:`recover`, so that the exception is not delayed.
        """
        with _ENDING:  # the second thread to notice waits for the first
            if self._passes.pop(task, None) is not None and not self._live_passes():
                self._give_back()

    def _give_back(self) -> None:
        self._put_hooks_back()
        for unit in self.units:
            # Gathers in flight stay so: waiting for them here could wait for a rank that raised, too.
            unit.reshard(ReshardReason.FAILED)
        # Gradients were completed on the post-backward stream; what users do with them runs on the current one.
        self.streams.compute_after_reduce()
        for unit in self.in_pass:
            # Waiting for a copy to the host may be waiting for ranks that will not come.
            unit.handle.grads.drop_arriving()
            unit.handle.grads.publish_failed()
        self._loosen()

    def _put_hooks_back(self) -> None:
        for unit in self.units:
            put_back(unit.handle)

    def went_through(self, tie: GraphTie) -> None:
        """A backward pass goes through the graph that ``tie`` belongs to."""
        self._ties[tie] = None

    def _loosen(self) -> None:
        # Last: until here callbacks may ask a tie for its unit, and the tie may hold the only reference.
        for tie in self._ties:
            tie.loosen()
        self._ties.clear()

    def recover(self) -> None:
        """Clean up after a backward pass that failed: its end was never reached."""
        if not compat.in_backward():
            # Out here no pass runs. On a device, autograd's thread lets go of one that failed a moment after the exception.
            with _ENDING:
                for task in list(self._passes):
                    self.backward_failed(task)
        if not self._dirty or self._live_passes():
            return
        self._dirty = False
        # Waited for, since other ranks joined them; dropped, since what they belong to was never completed.
        self.sync.abandon()
        for look in self.guards.backward_failed:
            look()
        for unit in self.units:
            # Here gathers in flight are waited for: the next pass would pair its own with what other ranks are still in.
            unit.reshard(ReshardReason.UNUSED)
            unit.end_pass()
        # Gradients that were complete were shown when the pass failed; the others are lost on every rank.
        self.in_pass.clear()
        self.partial.clear()

    def in_backward(self) -> bool:
        """Return whether a backward pass of this tree is under way."""
        return bool(self._passes) and bool(self._live_passes())


def refuse_busy(units: Iterable[Unit], call: str, remedy: str) -> None:
    """Refuse a call of a user's while units compute, or while full parameters are in a user's hands.

    Raises:
        TrainingStateError: some do; all are listed.
    """
    busy = [repr(unit) for unit in units if unit.training_state is not TrainingState.IDLE]
    if busy:
        raise TrainingStateError(
            f"{call}: expected to be in states [{TrainingState.IDLE}], got busy units {listing(busy)}. {remedy}"
        )


def _tensor_groups(units: list[Unit]) -> list[dist.ProcessGroup | None]:
    return [unit.config.groups.tensor for unit in units]


def check_homogeneous(units: list[Unit]) -> None:
    """Check the settings that must agree over one tree.

    Raises:
        FsdpValueError: they differ; lists the units on each side.
    """
    settings: dict[str, list[object]] = {
        "_use_orig_params": [unit.config.use_orig_params for unit in units],
        "limit_all_gathers": [unit.config.limit_all_gathers for unit in units],
        "_use_full_prec_in_eval": [unit.config.full_precision_in_eval for unit in units],
    }
    axes = [axis and dist.get_process_group_ranks(axis) for axis in _tensor_groups(units)]
    first = next((ranks for ranks in axes if ranks), None)
    settings["tensor-parallel ranks"] = [ranks or first for ranks in axes]  # units without such parameters fit any
    for name, values in settings.items():
        if any(value != values[0] for value in values):
            odd = [f"{type(unit.module).__name__}: {value}" for unit, value in zip(units, values) if value != values[0]]
            raise FsdpValueError(
                f"Expects one homogeneous value for {name}: expected {values[0]} everywhere, as in the root, got "
                f"{listing(odd)}. Give every unit of a tree the same value."
            )
