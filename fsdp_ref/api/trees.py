"""What can be done with a tree of units, however it was sharded: functions of any module.

``module`` may be a unit, or a plain module around several. The wrapper has the same functions as methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from fsdp_ref.access.summon import SummonOptions, summon
from fsdp_ref.annotations import outermost_units, unit_of
from fsdp_ref.errors import CommHookError, FsdpValueError, RootError, TrainingStateError, listing
from fsdp_ref.runtime.forward import call_unit
from fsdp_ref.runtime.root import Root, lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import TrainingState


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally in backward passes inside; the first one outside reduces all of them.

    Args:
        module: The module that runs: the context covers every outermost unit at or below it, with all units below those.

    Raises:
        FsdpValueError: There is no unit.
        RootError: A unit belongs to a larger tree.
        TrainingStateError: Forward, backward or a summon is running.
    """
    units: list[Unit] = []
    for unit in outermost_units(module, "no_sync"):
        units += lazy_init(unit).units
        if not unit.is_root:
            raise RootError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module: "
                f"expected the outermost unit, got {unit!r}. Use the module that you run."
            )
        if unit.training_state is not TrainingState.IDLE:
            raise TrainingStateError(
                f"no_sync: expected to be in states [{TrainingState.IDLE}] but current state is {unit.training_state}. "
                "Enter it outside of forward and summon_full_params."
            )
    # Each its own value: a unit may have been set by hand before (``set_requires_gradient_sync``).
    before = [unit.sync_gradients for unit in units]
    for unit in units:
        unit.sync_gradients = False
    try:
        yield
    finally:
        for unit, value in zip(units, before):
            unit.sync_gradients = value


def register_comm_hook(module: nn.Module, state: Any, hook: Callable[..., Any]) -> None:
    """Let ``hook`` reduce the gradients of every unit at or below ``module``, once, before the first backward.

    Args:
        module: The module that runs.
        state: The hook's first argument; see ``fsdp_ref.comm_hooks``.
        hook: ``hook(state, grad, output)`` for sharded units, ``hook(state, grad)`` for replicated ones.

    Raises:
        FsdpValueError: There is no unit, or ``hook`` is not callable.
        CommHookError: A unit belongs to a larger tree, has a hook already, or has a hybrid strategy, whose two-level
            reduction takes no hook; or ``hook`` is a hook of DDP, which takes buckets.
    """
    for unit in outermost_units(module, "register_comm_hook"):
        root = lazy_init(unit)
        _check_hook(root, unit, hook)
        for each in root.units:
            each.comm_hook, each.comm_hook_state = hook, state


def _check_hook(root: Root, unit: Unit, hook: object) -> None:
    if not unit.is_root:
        raise CommHookError("register_comm_hook can only be called on a root instance.")
    hybrid = [repr(each) for each in root.units if each.config.hybrid]
    if hybrid:
        raise CommHookError(
            f"Communication hook is not supported for hybrid strategies: expected units over one group, got {listing(hybrid)}."
            " Use another strategy."
        )
    if any(each.comm_hook is not None for each in root.units):
        raise CommHookError("A communication hook is already registered")
    if not callable(hook):
        raise FsdpValueError(f"The communication hook must be callable: expected a function, got {hook!r}. Pass one.")
    if _takes_bucket(hook):
        raise CommHookError(
            f"register_comm_hook: expected hook(state, grad[, output]), got {getattr(hook, '__name__', hook)}, which takes a DDP "
            "bucket. Use one of fsdp_ref.comm_hooks (fp16_compress_hook, bf16_compress_hook), or write one of that form."
        )


def _takes_bucket(hook: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):  # a callable of C++ says nothing of itself
        return False
    return any("GradBucket" in str(parameter.annotation) for parameter in parameters)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a unit other than ``forward`` run as its forward does: with full parameters and reduced gradients.

    Args:
        module: The wrapper, or the module with ``fully_shard``; other modules are left unchanged.
        method_name: The method, of the wrapped module for a wrapper. Hooks of the module do not run around it.

    Raises:
        FsdpValueError: There is no such method.

    Collectives:
        None here; the method itself communicates as a forward does.
    """
    unit = unit_of(module)
    if unit is None:
        return
    if not callable(getattr(unit.module, method_name, None)):
        raise FsdpValueError(
            f"register_fsdp_forward_method: expected a method of {type(unit.module).__name__}, got {method_name!r}. "
            "Check the spelling."
        )
    module.__dict__[method_name] = MethodType(partial(_run_as_forward, method_name), module)


def _run_as_forward(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None  # looked up anew, since a copy of the module is a unit of its own
    # A composable unit's own attribute is this function; what it stands for is the class's.
    method = getattr(type(module), name).__get__(module) if unit.module is module else getattr(unit.module, name)
    return call_unit(unit, method, args, kwargs)


def unshard_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[None]:
    """Show full parameters of the units at or below ``module`` while the context lasts.

    Args:
        module: Any module.
        recurse: Also units below; otherwise only the module's own.
        writeback: Keep edits.
        rank0_only: Only rank 0 of each shard group sees them; with ``writeback`` all ranks get its edits.
        offload_to_cpu: Show them on the CPU.
        with_grads: Show full averaged gradients too (original parameters only).

    See ``summon`` for errors and collectives.
    """
    return summon(module, SummonOptions(recurse, writeback, rank0_only, offload_to_cpu, with_grads))
