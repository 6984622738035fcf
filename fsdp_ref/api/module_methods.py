"""The methods that torch's ``fully_shard`` (since 2.6) gives to modules.

There a module becomes one of another class. Here it keeps its class, and has the methods as attributes of its own; where its
class has one of these names, the class's stays. All but ``unshard`` set what later passes do, and do not communicate.

Source: ``torch.distributed.fsdp.FSDPModule`` (torch 2.13) for names and meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, Final

from torch import nn

from fsdp_ref.annotations import unit_of, units_in
from fsdp_ref.errors import ConfigTypeError, FsdpValueError, UnsupportedError, listing
from fsdp_ref.runtime.root import close_ended
from fsdp_ref.runtime.unit import Ahead, Unit
from fsdp_ref.states import ReshardReason


class EarlyUnshard:
    """A gather that a user started ahead of forward."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the unit's full parameters are gathered; its forward does so by itself."""
        self._unit.handle.finish_unshard()


def unshard(module: nn.Module, async_op: bool = False) -> EarlyUnshard | None:
    """Gather the parameters of this unit alone; its next forward uses them.

    Collectives:
        An all-gather over the shard group unless they are gathered already. All ranks must call.
    """
    unit = _unit(module, "unshard")
    close_ended(unit)
    unit.unshard(Ahead.USER)
    early = EarlyUnshard(unit)
    if async_op:
        return early
    early.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Free the full parameters of this unit alone."""
    unit = _unit(module, "reshard")
    close_ended(unit)
    unit.reshard(ReshardReason.OUT_OF_DATE)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Reduce gradients in backward, or accumulate them on this rank (what ``no_sync`` does while it lasts)."""
    for unit in _units(module, "set_requires_gradient_sync", recurse=recurse):
        unit.sync_gradients = requires_gradient_sync


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Reduce over replicas in backward; leaving that out alone is refused.

    Raises:
        UnsupportedError: False for hybrid units.
    """
    hybrid = [repr(each) for each in _units(module, "set_requires_all_reduce", recurse=recurse) if each.config.hybrid]
    if hybrid and not requires_all_reduce:
        raise UnsupportedError(
            "set_requires_all_reduce(False): expected units that reduce over one group, got hybrid ones: "
            f"{listing(hybrid)}. Accumulate with set_requires_gradient_sync(False), which leaves out both reductions."
        )


def set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool, recurse: bool = True) -> None:
    """Free full parameters after forward, also those of the outermost unit, or keep them for backward.

    Raises:
        FsdpValueError: Not a boolean.
    """
    if not isinstance(reshard_after_forward, bool):
        raise FsdpValueError(
            f"set_reshard_after_forward: expected True or False, got {reshard_after_forward!r}. Pass a bool."
        )
    for unit in _units(module, "set_reshard_after_forward", recurse=recurse):
        unit.reshards_after_forward = reshard_after_forward


def set_reshard_after_backward(module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True) -> None:
    """Free full parameters after backward, or keep them for the next forward, which gathers anew what was stepped since."""
    for unit in _units(module, "set_reshard_after_backward", recurse=recurse):
        unit.reshards_after_backward = reshard_after_backward


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """Accept what lets torch wait for reductions later: here each backward waits, and gradients are the same."""
    _unit(module, "set_is_last_backward")


def set_modules_to_forward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Gather the parameters of these units once this one's are gathered, in forward."""
    named = "set_modules_to_forward_prefetch"
    _unit(module, named).forward_targets = tuple(_unit(each, named) for each in modules)


def set_modules_to_backward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Gather the parameters of these units once this one's are gathered, in backward, in place of the one that ran before it."""
    named = "set_modules_to_backward_prefetch"
    _unit(module, named).backward_targets = tuple(_unit(each, named) for each in modules)


def set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    """Divide this unit's summed gradients by ``factor`` in place of the number of ranks.

    Raises:
        FsdpValueError: Not a positive number.
    """
    if not factor > 0:
        raise FsdpValueError(f"set_gradient_divide_factor: expected a positive number, got {factor!r}. Pass one.")
    _unit(module, "set_gradient_divide_factor").divide_factor = float(factor)


def set_reduce_scatter_divide_factor(module: nn.Module, factor: float) -> None:
    """Older name of :func:`set_gradient_divide_factor`."""
    set_gradient_divide_factor(module, factor)


METHODS: Final = (
    unshard,
    reshard,
    set_requires_gradient_sync,
    set_requires_all_reduce,
    set_reshard_after_forward,
    set_reshard_after_backward,
    set_is_last_backward,
    set_modules_to_forward_prefetch,
    set_modules_to_backward_prefetch,
    set_gradient_divide_factor,
    set_reduce_scatter_divide_factor,
)


def give_methods(module: nn.Module) -> None:
    """Let users call :data:`METHODS` on a module; a copy of it has its own."""
    for method in METHODS:
        if not hasattr(type(module), method.__name__):
            module.__dict__[method.__name__] = MethodType(method, module)


def _unit(module: Any, method: str) -> Unit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ConfigTypeError(
            f"{method}: expected a module that fully_shard was applied to, got {type(module).__name__}. Apply "
            "fully_shard to it first."
        )
    return unit


def _units(module: nn.Module, method: str, *, recurse: bool) -> list[Unit]:
    own = _unit(module, method)
    return units_in(module) if recurse else [own]
