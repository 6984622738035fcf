"""What is a unit: one module whose parameters are gathered, computed with and freed together?

A unit ties a module to its handle (None for a unit that owns no parameters), to its settings and to the root that it
runs under. The wrapper and the composable API make the same units; only how forward reaches them differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_ref.config import UnitConfig
from fsdp_ref.errors import FsdpRuntimeError, FsdpTypeError
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_ref.runtime.events import OBSERVERS, UnitEvent, UnitEventKind, emit
from fsdp_ref.runtime.graph_ties import GraphSide
from fsdp_ref.runtime.passes import UnitPasses
from fsdp_ref.states import TrainingState
from fsdp_ref.storage.precision import BufferCaster
from fsdp_ref.storage.views import alias

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


class Unit(UnitPasses):
    """One sharded module.

    Args:
        module: the module whose parameters are sharded.
        holder: the module that users call: the wrapper, or ``module`` itself.
        handle: the flat parameter, None when the unit owns no parameters.
        config: settings.
        modules: the modules whose nearest unit this is (for buffers).
        ignored: what this unit and everything above it leave alone (a ``build.ignored.Ignored``).
    """

    def __init__(
        self,
        module: nn.Module,
        holder: nn.Module,
        handle: FlatHandle | None,
        config: UnitConfig,
        modules: tuple[nn.Module, ...],
        ignored: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.holder = holder
        self.handle = handle
        self.config = config
        self.modules = modules
        self.buffers = BufferCaster(modules, config.mixed_precision.buffer_dtype)
        self.ignored = ignored
        self.name = ""
        self.root: Root | None = None
        self.is_root: bool | None = None
        self.sync_gradients = True
        self.graph = GraphSide(self)
        self.comm_hook: Callable[..., Any] | None = None
        self.comm_hook_state: Any = None
        # Parameters summoned by a state-dict hook until the hook after it, and whether the tree had no root before. Kept
        # here, not by unit elsewhere: when collecting a state raises there is no hook after, and all this goes together.
        self.summoned_for_state: tuple[AbstractContextManager[None], bool] | None = None

    # ------------------------------------------------------------------ facts

    @property
    def full_precision_now(self) -> bool:
        """Whether this unit computes in full precision: evaluation, when the switch for it is on."""
        return self.config.switches.full_precision_in_eval and not self.module.training

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that inputs are cast to, None for none."""
        return None if self.full_precision_now else self.config.mixed_precision.param_dtype

    def note(self, kind: UnitEventKind, *, prefetch: bool = False, freed: bool = False) -> None:
        """Tell observers what this unit does."""
        if OBSERVERS:
            fqns = () if self.handle is None else tuple(self.handle.fqns)
            emit(UnitEvent(kind, self.name, fqns, prefetch, freed))

    def adopt(self, root: Root, name: str, *, is_root: bool) -> None:
        """Become part of a tree."""
        self.root = root
        self.is_root = is_root
        self.name = name
        if self.handle is not None:
            self.handle.name = name
            self.handle.streams = root.streams
        if not self.full_precision_now:
            self.buffers.lower()

    def leave(self) -> None:
        """Belong to no tree again."""
        self.root = None
        self.is_root = None

    # ------------------------------------------------------------------ full parameters

    def start_gather(self, *, prefetch: bool) -> None:
        """Issue the gather, when one is needed."""
        if self.handle is not None and self.handle.start_unshard():
            self.note(UnitEventKind.GATHER, prefetch=prefetch)

    def unshard(self) -> None:
        """Have full parameters now."""
        if self.handle is None:
            return
        if not self.prefetched:
            self.note(UnitEventKind.UNSHARD)
        self.prefetched = self.early = False
        self.start_gather(prefetch=False)
        self.handle.finish_unshard()

    def prefetch(self) -> None:
        """Ask for full parameters ahead of need."""
        self.note(UnitEventKind.UNSHARD, prefetch=True)
        self.prefetched = True
        self.start_gather(prefetch=True)

    def reshard(self, *, free: bool) -> None:
        """Give full parameters up; without ``free`` only what is shown changes."""
        if self.handle is None:
            return
        freed = free and self.handle.sharded
        if free:
            self.handle.reshard()
            self.keep_unsharded = False
        self.prefetched = False
        self.handle.originals.show_sharded()
        self.note(UnitEventKind.RESHARD, freed=freed)

    def drop(self) -> None:
        """Free full parameters without a word: cleaning up after an unused gather or an aborted pass."""
        self.prefetched = self.keep_unsharded = self.early = False
        self.graph.forget()
        if self.handle is not None:
            self.handle.reshard()
            if self.handle.originals.shown is not Shown.SUMMONED:
                self.handle.originals.show_sharded()

    # ------------------------------------------------------------------ settings that change

    def synchronise(self, wanted: bool) -> bool:
        """Let backward reduce gradients, or keep them local; return what held before."""
        before, self.sync_gradients = self.sync_gradients, wanted
        return before

    def hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let a user's function reduce gradients."""
        self.comm_hook = hook
        self.comm_hook_state = state

    # ------------------------------------------------------------------ views

    def show_views(self) -> None:
        """Put views of the full parameter on the modules."""
        if self.handle is not None:
            record = self.graph.record
            shown = [alias(view) for view in self.handle.compute_views()] if record is None else record.views
            self.handle.originals.show_computing(shown)

    def originals(self) -> Sequence[nn.Parameter]:
        """Return the user's parameters that this unit holds."""
        return () if self.handle is None else self.handle.originals.params

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
        UnitPasses.__init__(copied)
        own = {
            name: copy.deepcopy(vars(self)[name], memo)
            for name in ("module", "holder", "modules", "buffers", "ignored")
        }
        vars(copied).update(own)
        vars(copied).update(handle=copy.deepcopy(self.handle, memo), graph=GraphSide(copied), root=None, is_root=None)
        # A ``no_sync`` that is open around the copying ends for the original alone: nobody would end it for the copy.
        copied.sync_gradients = True
        return copied

    def __reduce__(self) -> Any:
        raise FsdpTypeError(
            f"cannot pickle {self!r}: expected plain tensors and modules, got a module that belongs to process groups. "
            "Save a state dict, or copy full parameters inside summon_full_params."
        )

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {type(self.module).__name__}, {self.config.strategy.name})"
