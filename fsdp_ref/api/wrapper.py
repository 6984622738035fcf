"""``FullyShardedDataParallel``: the wrapper, with the surface of torch's class of that name.

Thin: construction hands everything to ``build.attach``, running to ``runtime.forward``. Source for names, argument
order and defaults: ``torch.distributed.fsdp.FullyShardedDataParallel`` (torch 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.access.summon import SummonOptions, summon
from fsdp_ref.annotations import unit_of, units_in, units_under
from fsdp_ref.api.contract import check_one_module
from fsdp_ref.api.module_methods import EarlyUnshard, unshard
from fsdp_ref.api.trees import no_sync, register_comm_hook, unshard_params
from fsdp_ref.build.attach import Connect, attach
from fsdp_ref.build.ignored import resolve_ignored
from fsdp_ref.build.plan import PlannedUnit
from fsdp_ref.config import BackwardPrefetch
from fsdp_ref.errors import TrainingStateError
from fsdp_ref.handle.writeback import refuse_other_device
from fsdp_ref.naming import FSDP_WRAPPED_MODULE, without_wrappers
from fsdp_ref.runtime.forward import call_unit
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import ReshardReason, TrainingState
from fsdp_ref.torch_names.attributes import UnitAttributes
from fsdp_ref.training.clip import clip_grad_norm_


class FullyShardedDataParallel(UnitAttributes, nn.Module):
    """Shards the parameters of ``module`` over data-parallel ranks.

    Args:
        module: the module to wrap.
        process_group: the shard group; for hybrid strategies the pair (shard group, replicate group). Default: all ranks.
        sharding_strategy: what is sharded and when it is freed. Default: ``FULL_SHARD``.
        cpu_offload: where shards live outside computation.
        auto_wrap_policy: which submodules become units: an object with ``_run_policy`` or a callable.
        backward_prefetch: when backward prefetches the next unit; None: never.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: modules to leave alone.
        param_init_fn: initializes modules that are on the meta device.
        device_id: the device of computation. Default: where the parameters are.
        sync_module_states: start from rank 0's parameters and buffers.
        forward_prefetch: prefetch the next unit in forward, in the order of the first iteration.
        limit_all_gathers: bound how far the host runs ahead of a device.
        use_orig_params: show the original parameters instead of one flat parameter per unit.
        ignored_states: parameters, or modules, to leave alone.
        device_mesh: instead of ``process_group``: 1-D, or (replicate, shard) for hybrid strategies.

    Raises:
        FsdpError: arguments that contradict one another or the module; the message names every offender.

    Collectives:
        With ``sync_module_states`` broadcasts; hybrid strategies without groups make groups. All ranks must construct.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        check_one_module("FullyShardedDataParallel", module)
        _warn_of_container(module)
        options = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        attach(module, options, _wrapping(self, module), policy=auto_wrap_policy, ignored=ignored)

    def _wrap(self, module: nn.Module) -> FullyShardedDataParallel:
        """Become the wrapper of ``module``; the caller gives it its unit."""
        setattr(self, FSDP_WRAPPED_MODULE, module)
        self.training = module.training
        return self

    # ------------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather, run the wrapped module, free. See ``runtime.forward`` for collectives."""
        return call_unit(self._unit, self._modules[FSDP_WRAPPED_MODULE], args, kwargs)  # type: ignore[arg-type]  # set in _wrap

    @property
    def module(self) -> nn.Module:
        """The wrapped module, looking through an activation-checkpoint wrapper."""
        inner: Any = self._modules[FSDP_WRAPPED_MODULE]
        return inner._modules.get("_checkpoint_wrapped_module", inner)  # a module

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module that the wrapper lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(super().__getattr__(FSDP_WRAPPED_MODULE), name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module.__getitem__(key)  # type: ignore[operator]  # fails as the module itself would

    def check_is_root(self) -> bool:
        """Return whether this is the outermost unit; decide it now if necessary."""
        lazy_init(self._unit)
        return bool(self._unit.is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return the units at or below ``module``, depth first; with ``root_only`` those that are roots."""
        found = [(called, unit) for _, called, unit in units_under(module)]
        if root_only:
            for _, unit in found:
                lazy_init(unit)
            found = [(called, unit) for called, unit in found if unit.is_root]
        return [called for called, _ in found]

    # ------------------------------------------------------------------ full parameters

    summon_full_params = staticmethod(unshard_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module with full parameters visible; edits persist.

        Collectives: as ``summon_full_params`` with all units.
        """
        self._assert_state(TrainingState.IDLE)
        fresh = self._unit.root is None
        with summon(self, SummonOptions()):
            _visit(self, fn)
        if fresh and self._unit.root is not None:
            # Initializing weights must not decide which unit is the root.
            self._unit.root.disband()
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module``; without the wrappers' prefixes while parameters are summoned."""
        clean = self._unit.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, param in super().named_parameters(*args, **kwargs):
            yield (without_wrappers(name) if clean else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As ``nn.Module``; without the wrappers' prefixes while parameters are summoned."""
        clean = self._unit.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (without_wrappers(name) if clean else name), buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Cast the module; the flat parameters follow at once.

        Raises:
            FsdpRuntimeError: It would move units to another device; nothing is moved then.
        """
        found = units_in(self)
        for handle in (unit.handle for unit in found if not unit.handle.empty):
            refuse_other_device(handle, fn(torch.empty_like(handle.shard_S[:0])).device)
        for unit in found:
            unit.reshard(ReshardReason.OUT_OF_DATE)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for unit in found:
            unit.absorb()
        return self

    def _unshard(self, async_op: bool = False) -> EarlyUnshard | None:
        """Begin to gather this unit's parameters ahead of forward; return something to wait for with ``async_op``."""
        lazy_init(self._unit)
        return unshard(self, async_op)

    # ------------------------------------------------------------------ gradients

    # All three are of the root alone.
    no_sync = no_sync
    clip_grad_norm_ = clip_grad_norm_
    register_comm_hook = register_comm_hook

    # ------------------------------------------------------------------ object protocol

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Check the unit's training state.

        Raises:
            TrainingStateError: it is none of those given.
        """
        allowed = state if isinstance(state, list) else [state]
        if self._unit.training_state.name not in {each.name for each in allowed}:
            raise TrainingStateError(
                f"{type(self).__name__}: expected to be in states {allowed} but current state is "
                f"{self._unit.training_state}. Finish the current operation first."
            )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` which attribute names of entries leave out."""
        return {"": FSDP_WRAPPED_MODULE}

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert isinstance(unit, Unit)  # set while constructing
        return unit


def _warn_of_container(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {module}",
            UserWarning,
            stacklevel=3,
        )


def _visit(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Call ``fn`` on children before parents, without asking nested wrappers to summon what is summoned already."""
    for child in module.children():
        _visit(child, fn)
    fn(module)


def _wrapping(root: FullyShardedDataParallel, module: nn.Module) -> Connect:
    """Wrap planned modules: the root by the wrapper under construction, others by new ones put in their parents."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}

    def connect(planned: PlannedUnit) -> nn.Module:
        if planned.module is module:
            return root._wrap(module)
        if not places:  # before the first is wrapped: that changes what parents show, no more
            for parent in module.modules():
                for name, child in parent._modules.items():
                    if child is not None:
                        places.setdefault(child, []).append((parent, name))
        wrapper = type(root).__new__(type(root))
        nn.Module.__init__(wrapper)
        for parent, name in places.get(planned.module, ()):
            setattr(parent, name, wrapper)
        return wrapper._wrap(planned.module)

    return connect
