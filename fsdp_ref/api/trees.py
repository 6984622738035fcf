"""What can be done with a tree of units, however it was sharded: functions of any module, for the composable API.

The wrapper has methods of the same names on its root. Here ``module`` may be a unit, or a plain module around several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fsdp_ref.access.summon import SummonOptions, summon
from fsdp_ref.annotations import outermost_units, unit_of
from fsdp_ref.errors import FsdpValueError, listing
from fsdp_ref.runtime import reduction_settings
from fsdp_ref.runtime.forward import call_unit
from fsdp_ref.training import clip


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
    with ExitStack() as stack:
        for unit in outermost_units(module, "no_sync"):
            stack.enter_context(reduction_settings.no_sync(unit))
        yield


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients at or below ``module`` so that their joint norm over all ranks is at most ``max_norm``.

    Args:
        module: A module with one outermost unit.
        max_norm: The bound.
        norm_type: The p of the norm, inf included.

    Returns:
        The norm before clipping, a scalar that is the same on every rank; see ``training.clip``.

    Raises:
        FsdpValueError: There is no unit, or several outermost ones, which have no common norm.
        RootError: The unit belongs to a larger tree.
        FsdpRuntimeError: Gradients wait unreduced from ``no_sync``.

    Collectives:
        One all-reduce per shard group: all ranks must call.
    """
    found = outermost_units(module, "clip_grad_norm_")
    if len(found) > 1:
        raise FsdpValueError(
            "clip_grad_norm_: expected one outermost unit, got "
            f"{listing(type(unit.module).__name__ for unit in found)}. Make the module around them a unit."
        )
    return clip.clip_grad_norm_(found[0], float(max_norm), float(norm_type))


def register_comm_hook(module: nn.Module, state: Any, hook: Callable[..., Any]) -> None:
    """Let ``hook`` reduce the gradients of every unit at or below ``module``, once, before the first backward.

    Args:
        module: The module that runs.
        state: The hook's first argument; see ``fsdp_ref.comm_hooks``.
        hook: ``hook(state, grad, output)`` for sharded units, ``hook(state, grad)`` for replicated ones.

    Raises:
        FsdpValueError: There is no unit, or ``hook`` is not callable.
        CommHookError: A unit belongs to a larger tree, has a hook already, or or has a hybrid strategy, whose two-level
            reduction takes no hook; or ``hook`` is a hook of DDP, which takes buckets.
    """
    for unit in outermost_units(module, "register_comm_hook"):
        reduction_settings.register_comm_hook(unit, state, hook)


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
