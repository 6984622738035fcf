"""The values of parameters before they are flattened.

Parameters on the meta device get storage and initial values; then they move to the device of computation; then, if requested,
every rank takes rank 0's values. Ignored parameters, and those of existing units, are not touched.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_ref.comm.collectives import broadcast_tensors
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, MaterializeError, listing
from fsdp_ref.handle.flatten import check_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fsdp_ref.build.ignored import Ignored
    from fsdp_ref.build.plan import PlannedUnit
    from fsdp_ref.build.resolve import ResolvedUnit
    from fsdp_ref.config import UnitConfig
    from fsdp_ref.storage.views import ManagedParam


def check_initializable(unit: PlannedUnit, init: object, ignored: Ignored) -> None:
    """Refuse a unit on the meta device that nothing can give values to.

    Raises:
        FsdpValueError: ``init`` is no callable.
        MaterializeError: Without ``init``, modules that have no ``reset_parameters``; a warning names them first.
    """
    pending = [module for module in unit.modules if _on_meta(module, ignored)]
    if not pending:
        return
    if init is not None and not callable(init):
        raise FsdpValueError(
            f"Expected {init!r} of type {type(init).__name__} to be callable: param_init_fn takes a module and "
            "initializes it. Pass a function."
        )
    lacking = sorted({type(module).__name__ for module in pending if getattr(module, "reset_parameters", None) is None})
    if init is None and lacking:
        _warn_of_reset(listing(lacking), "they have no such method")
        raise MaterializeError(
            f"unit {unit.fqn or 'root'!r} on the meta device: expected modules with `reset_parameters`, got "
            f"{listing(lacking)}. Give them that method, or pass param_init_fn."
        )


def _warn_of_reset(classes: str, why: object) -> None:
    warnings.warn(
        f"Unable to call `reset_parameters()` for module on meta device with error {why}. Please ensure that "
        f"your module of type {classes} implements a `reset_parameters()` method.",
        UserWarning,
        stacklevel=2,
    )


def materialize_units(units: Sequence[ResolvedUnit], ignored: Ignored) -> dict[nn.Module, list[ManagedParam]]:
    """Give storage and values to parameters on the meta device; return each unit's resulting parameters.

    With ``param_init_fn`` it is called on every module of the unit, breadth first; without, each module that has
    parameters or buffers of its own on the meta device gets memory and ``reset_parameters()``. Tied parameters stay tied.

    Raises:
        FsdpError: The new parameters cannot be flattened, or differ from the previous ones.
        Exception: Whatever the user's function raises. In both cases every module has its own tensors again.
    """
    if not any(_on_meta(module, ignored) for each in units for module in each.planned.modules):
        return {each.planned.module: list(each.planned.params) for each in units}
    with _put_back_on_failure(units):
        touched = {module for each in units for module in _initialized(each, ignored)}
        # After all are initialized: a tied parameter may be on modules of several units.
        _check_places(units, touched, ignored)
        return {each.planned.module: _read_again(each, touched) for each in units}


@contextmanager
def _put_back_on_failure(units: Sequence[ResolvedUnit]) -> Iterator[None]:
    modules = [module for each in units for module in each.planned.modules]
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    data = [(param, param.data) for _, params, _ in before for param in params.values() if param is not None]
    try:
        yield
    except BaseException:
        for module, params, buffers in before:
            module._parameters.clear()
            module._parameters.update(params)
            module._buffers.clear()
            module._buffers.update(buffers)
        for param, values in data:
            param.data = values
        raise


def _initialized(unit: ResolvedUnit, ignored: Ignored) -> list[nn.Module]:
    """Initialize the unit's modules if one of them is on the meta device; return those that may have new tensors."""
    planned = unit.planned
    depth = {module: name.count(".") + bool(name) for name, module in planned.module.named_modules()}
    modules = sorted(planned.modules, key=depth.__getitem__)  # breadth first
    pending = [module for module in modules if _on_meta(module, ignored)]
    if not pending:
        return []
    with _ignored_params_kept(modules, ignored):
        if unit.init is not None:
            for module in modules:
                unit.init(module)
        else:
            for module in pending:
                _reset(module, unit.config.device)
    return modules


@contextmanager
def _ignored_params_kept(modules: Sequence[nn.Module], ignored: Ignored) -> Iterator[None]:
    """Initializing a module writes all of its parameters, including those that the caller asked to leave alone."""
    kept = [
        (module, name, param, param.data, None if param.is_meta else param.detach().clone())
        for module in modules
        for name, param in module.named_parameters(recurse=False)
        if param in ignored.params
    ]
    try:
        yield
    finally:
        for module, name, param, data, value in kept:
            module._parameters[name] = param
            if value is not None:
                param.data = data
                data.copy_(value)


def _check_places(units: Sequence[ResolvedUnit], touched: set[nn.Module], ignored: Ignored) -> None:
    """Check that initializing left a parameter wherever there was one, and put none elsewhere."""
    wanted: dict[nn.Module, set[str]] = {module: set() for module in touched}
    for site in (site for each in units for managed in each.planned.params for site in managed.sites):
        wanted.get(site.module, set()).add(site.name)
    changed: dict[str, None] = {}
    for module, names in wanted.items():
        found = {name for name, p in module._parameters.items() if p is not None and p not in ignored.params}
        changed |= {f"{type(module).__name__}.{name}": None for name in names ^ found}
    if changed:
        raise FsdpRuntimeError(
            "param_init_fn: expected the same parameters before and after, got a difference in "
            f"{listing(sorted(changed))}. Initialize parameters, and add or remove none."
        )


def _read_again(unit: ResolvedUnit, touched: set[nn.Module]) -> list[ManagedParam]:
    """Restore ties and check the new parameters: initializing may have put other parameters on the modules."""
    planned, config = unit.planned, unit.config
    if touched.isdisjoint(site.module for managed in planned.params for site in managed.sites):
        return list(planned.params)
    params = []
    for managed in planned.params:
        first = managed.sites[0]
        value = first.module._parameters[first.name]
        assert value is not None  # see _check_places
        for site in managed.sites[1:]:
            site.module._parameters[site.name] = value
        params.append(dataclasses.replace(managed, param=value))
    values = [managed.param for managed in params]
    if values:
        check_params(values, planned.fqns, use_orig_params=config.use_orig_params)
    elsewhere = {value.device for value in values} - {config.device}
    if elsewhere and not unit.moves:
        raise FsdpRuntimeError(
            f"param_init_fn: expected parameters on {config.device}, where unit {planned.fqn or 'root'!r} computes, got "
            f"some on {listing(elsewhere)}. Pass device_id."
        )
    return params


def _on_meta(module: nn.Module, ignored: Ignored) -> bool:
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None and tensor.is_meta and tensor not in ignored.params:
                return True
    return False


def _reset(module: nn.Module, device: torch.device) -> None:
    reset: Any = module.reset_parameters
    try:
        with torch.no_grad():
            module.to_empty(device=device, recurse=False)
            reset()
    except BaseException as error:
        _warn_of_reset(str(type(module)), error)
        raise


def move_states(unit: PlannedUnit, device: torch.device, ignored: Ignored) -> None:
    """Move what ``unit`` manages to ``device``; parameters keep their objects."""
    with torch.no_grad():
        for module in unit.modules:
            for param in module._parameters.values():
                if param is not None and param.device != device and param not in ignored.params:
                    param.data = param.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def check_broadcastable(unit: PlannedUnit, device: torch.device) -> None:
    """Refuse to broadcast tensors that would stay on the CPU over a group that computes elsewhere.

    Raises:
        FsdpValueError: Parameters or buffers of the unit are on the CPU.
    """
    buffers = [buffer for module in unit.modules for buffer in module.buffers(recurse=False)]
    tensors = (*(managed.param for managed in unit.params), *buffers)
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        raise FsdpValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            f"{device}: pass device_id, or move the module first."
        )


def broadcast_states(params: Sequence[ManagedParam], modules: Sequence[nn.Module], config: UnitConfig) -> None:
    """Give all ranks rank 0's parameters and buffers: first along the replicas, then in the shard group.

    Before that, tensors that are equal on a tensor-parallel axis are broadcast from its first rank.

    Collectives:
        Those of ``broadcast_tensors`` over each of these groups. All ranks must call.
    """
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    plain = [managed.param for managed in params if managed.extension is None or managed.extension.group is None]
    tensors, groups = [*(managed.param for managed in params), *buffers], config.groups
    for group, some in ((groups.tensor, [*plain, *buffers]), (groups.replicate, tensors), (groups.shard, tensors)):
        if group is not None and group.size() > 1:
            broadcast_tensors(
                {id(each): each.detach() for each in some if each.numel()}.values(), group, "initial states"
            )
