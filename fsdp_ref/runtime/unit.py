"""A unit: one module whose parameters are gathered, computed with and freed together.

A unit ties a module to its handle (of no elements for a unit that owns no parameters), to its settings and to the root that
it runs under. The wrapper and the composable API make the same units; only how forward reaches them differs. Its life-cycle
state is one ``states.UnitState``; :meth:`Unit.reshard` is the only way to release full parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from fsdp_ref.autograd.graph_ties import GraphSide
from fsdp_ref.config import StateDictSettings, UnitConfig
from fsdp_ref.errors import FsdpRuntimeError, FsdpTypeError
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.writeback import absorb_params, keep_full_edits
from fsdp_ref.runtime.events import OBSERVERS, UnitEvent, UnitEventKind
from fsdp_ref.runtime.guards import Traffic
from fsdp_ref.states import READABLE, ReshardReason, TrainingState, UnitState, training_state_of
from fsdp_ref.storage.precision import BufferCaster

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


_AT_REST: Final = frozenset({UnitState.GATHERING, UnitState.UNSHARDED, UnitState.ACCUMULATING})
"""States in which full parameters wait for the next computation."""


class Ahead(Enum):
    """Why full parameters are gathered ahead of need."""

    OVERLAP = auto()
    """Only the bytes start early: the unit's own forward still requests them as usual."""
    PREFETCH = auto()
    """The runtime, for the next unit: its UNSHARD event is out."""
    USER = auto()
    """A user. The next forward uses what comes."""


class Unit:
    """One sharded module.

    Args:
        module: the module whose parameters are sharded.
        holder: the module that users call: the wrapper, or ``module`` itself.
        handle: the flat parameter; empty when the unit owns no parameters.
        config: settings.
        modules: the modules whose nearest unit this is (for buffers).
        ignored: what this unit and everything above it leave alone (a ``build.ignored.Ignored``).

    Attributes:
        life: the unit's life cycle, shared with the handle.
        ahead: why full parameters were requested ahead of need; None if they were not.
        state_dict_settings: in which form its state is saved and loaded.
        awaits_backward: an output of the latest forward may be differentiated.
        reshards_after_forward: whether full parameters are freed after forward; None: as the strategy says, and not the root's.
        reshards_after_backward: whether they are freed after backward.
        divide_factor: what summed gradients are divided by; None: the number of ranks.
        forward_targets: units to gather ahead of need in this one's forward; None: as settings say.
        backward_targets: the same in its backward.
        unguarded: autograd saved views of the latest forward, and not by way of our hooks.
        backward_task: the backward pass that state BACKWARD began in, -1 in other states.
    """

    def __init__(
        self,
        module: nn.Module,
        holder: nn.Module,
        handle: FlatHandle,
        config: UnitConfig,
        modules: tuple[nn.Module, ...],
        ignored: Any = None,
    ) -> None:
        self.module = module
        self.holder = holder
        self.handle = handle
        self.config = config
        self.modules = modules
        self.buffers = BufferCaster(modules, config.mixed_precision.buffer_dtype)
        self.ignored = ignored
        self.name = ""
        self.comm_hook: Callable[..., Any] | None = None
        self.comm_hook_state: Any = None
        self.reshards_after_forward: bool | None = None
        self.reshards_after_backward = True
        self.divide_factor: float | None = None
        self.state_dict_settings = StateDictSettings()
        self._begin_life()

    def _begin_life(self) -> None:
        """Set what a unit has when it is made or copied: it belongs to no tree, and nothing runs."""
        # The handle's own object: a move of either is a move of both.
        self.life = self.handle.life
        self.graph = GraphSide(self)
        self.root: Root | None = None
        self.is_root: bool | None = None
        self.sync_gradients = True
        self.ahead: Ahead | None = None
        self.awaits_backward = False
        self.unguarded = False
        self.backward_task = -1
        self.forward_targets: tuple[Unit, ...] | None = None
        self.backward_targets: tuple[Unit, ...] | None = None

    # ------------------------------------------------------------------ facts

    @property
    def state(self) -> UnitState:
        """The unit's life-cycle state."""
        return self.life.state

    @property
    def training_state(self) -> TrainingState:
        """The state in torch's words."""
        return training_state_of(self.life.state)

    @property
    def full_precision_now(self) -> bool:
        """Whether this unit computes in full precision: evaluation, when the switch for it is on."""
        return self.config.full_precision_in_eval and not self.module.training

    def note(self, kind: UnitEventKind, *, prefetch: bool = False, freed: bool = False) -> None:
        """Report to observers what this unit does."""
        for observer in tuple(OBSERVERS):
            observer(UnitEvent(kind, self.name, tuple(self.handle.fqns), prefetch, freed))

    def adopt(self, root: Root, name: str, *, is_root: bool) -> None:
        """Become part of a tree."""
        self.root = root
        self.is_root = is_root
        self.name = name
        self.handle.name = name
        # From here on gathers overlap: what was issued before ran on the current stream, and needs no event.
        self.handle.streams = root.streams
        # At first use and not when the unit is made: users load states into buffers of their own dtype before.
        if not self.full_precision_now:
            self.buffers.lower()

    def leave(self) -> None:
        """Belong to no tree again."""
        self.root = None
        self.is_root = None

    # ------------------------------------------------------------------ life cycle

    def unshard(self, ahead: Ahead | None = None) -> None:
        """Have full parameters now; with ``ahead``, begin to gather them and have them at a later call without it.

        Collectives:
            An all-gather over the shard group unless they are gathered or in flight. All ranks must call.
        """
        handle = self.handle
        if ahead is Ahead.USER:
            self._make_way()
        elif ahead is Ahead.PREFETCH or (ahead is None and self.ahead is not Ahead.PREFETCH and not handle.empty):
            self.note(UnitEventKind.UNSHARD, prefetch=ahead is Ahead.PREFETCH)
        # Bytes that started early are no promise: an edit before the forward still drops them.
        if ahead is not Ahead.OVERLAP:
            self.ahead = ahead
        # The event tells of the step, also where nothing travels; guards hear only of what was sent.
        if handle.start_unshard() and not handle.empty:
            self.note(UnitEventKind.GATHER, prefetch=ahead is not None)
            if handle.sharded and self.root is not None:
                for look in self.root.guards.sends:
                    look(self, Traffic.GATHER)
        if ahead is None:
            handle.finish_unshard()

    def _make_way(self) -> None:
        """Before a gather that a user asked for: nothing that users may still change is read earlier than they think."""
        # Also gradients: a user who gathers early may have cleared them, and forward looks only later.
        self.absorb()
        # The optimizer's step, or a user's edit, may still write to the shard on the current stream.
        self.handle.streams.gather_after_compute()
        if self.life.state is UnitState.UNSHARDED and self.ahead is not Ahead.USER:
            # Left over from a forward without backward; the optimizer may have stepped since, and forward would reuse it.
            self.reshard(ReshardReason.OUT_OF_DATE)

    def absorb(self) -> None:
        """Take over parameters and gradients that the user replaced."""
        absorb_params(self.handle)
        self.handle.grads.absorb()

    def end_pass(self) -> None:
        """Forget what the latest forward and backward left to do; gathered parameters are another matter."""
        self.awaits_backward = self.unguarded = False
        self.backward_task = -1

    def reshard(self, reason: ReshardReason) -> None:
        """Release full parameters, or keep them where strategy and synchronisation say so.

        After forward and backward the strategy decides, and observers hear of it. For every other reason they go,
        silently: no computation asked. Parameters that a running forward or a user has are left to them.
        """
        after_backward = reason is ReshardReason.AFTER_BACKWARD
        if after_backward or reason is ReshardReason.FAILED:
            self.end_pass()
        if self.life.state is UnitState.FORWARD or self.life.state is UnitState.SUMMONED:
            return
        handle = self.handle
        if handle.empty:
            handle.reshard()
            return
        # Users may have edited originals that were shown in full: their memory goes below.
        keep_full_edits(handle)
        if after_backward or reason is ReshardReason.AFTER_FORWARD:
            if self.life.state is not UnitState.SHARDED:
                self._reshard_as_set(handle, after_backward=after_backward)
            return
        if reason is ReshardReason.OUT_OF_DATE:
            absorb_params(handle)  # before the memory goes: users may have changed what was shown in full
        self.ahead = None
        # The record's views lie over memory that goes; a later forward makes views, and a node, of its own.
        self.graph.forget()
        # A gather in flight waits for other ranks; an exception must not. ``Root.recover`` ends it later.
        if not (reason is ReshardReason.FAILED and self.life.state is UnitState.GATHERING):
            handle.reshard()
            handle.streams.free_rest()  # no gather of the same pass follows that would
        handle.originals.show_sharded()

    def computing(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parameters for a forward that activation checkpointing repeats in backward.

        Checkpointing keeps what that forward saves by itself, past our hooks. With ``create_graph`` it is read once more,
        by the backward of the new graph, when the buffer is gone: then modules compute with copies that the graph owns.
        """
        return [view.clone() for view in views] if self.root is None or self.root.creates_graph else views

    def drop_out_of_date(self) -> None:
        """Free full parameters that were gathered before the parameters were changed; the next use gathers again.

        The views that the pass computes with stay: they lie over the same buffer.
        """
        handle = self.handle
        if self.life.state not in _AT_REST or not handle.versions.out_of_date():
            return
        keep_full_edits(handle)
        self.ahead = None
        # The edit that made them old may still run on the current stream.
        handle.streams.gather_after_compute()
        handle.reshard()

    def _reshard_as_set(self, handle: FlatHandle, *, after_backward: bool) -> None:
        frees = self._frees_after_backward(handle) if after_backward else self._frees_after_forward(handle)
        self.ahead = None
        if frees:
            handle.reshard()
        elif after_backward and self.life.state is not UnitState.ACCUMULATING:
            self.life.move(UnitState.ACCUMULATING, self.name)
        handle.originals.show_sharded()
        self.note(UnitEventKind.RESHARD, freed=frees and handle.sharded)
        if after_backward or self.life.state not in READABLE or not handle.sharded or self._reshards_after_forward:
            return
        # Shown in full only while no gradient of the shard is there: an optimizer step must find matching shapes. And not
        # a copy in lower precision: what users make of it (``p.data = p * 2``) would come back rounded.
        if handle.compute_dtype != handle.precision.original:
            return
        if self.config.use_orig_params and all(param.grad is None for param in handle.originals.params):
            # The originals share the buffer from here on: before it is freed, edits are kept (``keep_full_edits``).
            handle.originals.show_full()

    def _frees_after_forward(self, handle: FlatHandle) -> bool:
        # Without a buffer there is nothing to free; a buffer that accumulation keeps belongs to it until the pass
        # that reduces.
        if not handle.needs_buffer or (self.life.state is UnitState.ACCUMULATING and torch.is_grad_enabled()):
            return False
        # Where no output can be differentiated no backward will come that frees (one that enters elsewhere gathers anew).
        for_good = not torch.is_grad_enabled() or not self.awaits_backward
        if for_good and self.unguarded:
            # Under other saved-tensor hooks autograd holds the views themselves, and an output that cannot be searched (a
            # user's object) may lead to them: the end of backward frees.
            return False
        return for_good or (self._reshards_after_forward and not (self.is_root and self.reshards_after_forward is None))

    def _frees_after_backward(self, handle: FlatHandle) -> bool:
        # A low-precision copy that is not gathered (NO_SHARD) is out of date after the next optimizer step.
        copied = not handle.sharded
        unused = self.life.state is UnitState.GATHERING
        if copied or unused:
            return True
        # Kept through a step, it is found out of date by the next forward, which gathers anew.
        return self.reshards_after_backward and (self.sync_gradients or self._reshards_after_forward)

    @property
    def _reshards_after_forward(self) -> bool:
        chosen = self.reshards_after_forward
        return self.config.reshards_after_forward if chosen is None else chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Return an independent unit over the same groups, for the copy of its module; it belongs to no tree yet."""
        if self.training_state is not TrainingState.IDLE:
            raise FsdpRuntimeError(
                f"deepcopy of {self!r}: expected an idle unit, got {self.training_state}. Copy the model outside of "
                "forward, backward and summon_full_params."
            )
        copied = Unit.__new__(Unit)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        # Through the memo, with the module around: modules know the unit, and the unit knows them.
        own = {
            name: copy.deepcopy(vars(self)[name], memo)
            for name in ("module", "holder", "modules", "buffers", "ignored", "handle")
        }
        vars(copied).update(own)
        # Also settings: a ``no_sync`` that is open around the copying ends for the original alone.
        copied._begin_life()
        return copied

    def __reduce__(self) -> Any:
        raise FsdpTypeError(
            f"cannot pickle {self!r}: expected plain tensors and modules, got a module that belongs to process groups. "
            "Save a state dict, or copy full parameters inside summon_full_params."
        )

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {type(self.module).__name__}, {self.config.strategy.name})"
