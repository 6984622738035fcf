"""When do torch's FSDP1 and FSDP2 gather and free their units? Seen from outside, since neither reports it.

Transitions: `unshard` (asked for), `gather` (memory filled), `reshard` (given up), `free` (memory released). The
functions watched are private; one that a torch release no longer has is reported, not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from fsdp_testing.errors import InvalidImplementation
from fsdp_testing.implementations.shared import naming

Emit = Callable[[str, str, tuple[str, ...]], None]
Units = list[tuple[str, tuple[str, ...]]]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Set `owner.name` to `make(original)` while the context lasts."""
    original = owner.__dict__.get(name)
    if original is None:
        raise InvalidImplementation(
            f"unit trace: expected {getattr(owner, '__name__', owner)}.{name}, got none in this torch. "
            "Do not claim `unit_trace` on it."
        )
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _names(model: nn.Module) -> Mapping[nn.Module, str]:
    return {module: naming.original(fqn) for fqn, module in model.named_modules(remove_duplicate=True)}


def _below(unit: str, fqns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{unit}.{fqn}" if unit else fqn for fqn in fqns)


def fsdp1_units(model: nn.Module) -> Units:
    """Units with a handle, in FSDP1's order, with the parameters of each."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = _names(model)
    found: Units = []
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is not None:
            name = names[unit]
            found.append((name, _below(name, tuple(naming.original(f) for f in handle.flat_param._fqns))))
    return found


@contextmanager
def fsdp1_trace(model: nn.Module, emit: Emit) -> Iterator[None]:
    """Report to `emit` FSDP1's transitions: calls of its unshard and reshard, and what they really did."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils

    names_of = _names(model)
    names = {unit._handle: names_of[unit] for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle}

    def watch_unshard(original: Any) -> Any:
        def unshard(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            known = handle in names
            needed = known and handle.needs_unshard()
            if known:
                emit(names[handle], "unshard", ())
            result = original(state, handle, *args, **kwargs)
            if needed:
                emit(names[handle], "gather", ())
            return result

        return unshard

    def watch_reshard(original: Any) -> Any:
        def reshard(state: Any, handle: Any, free_unsharded_flat_param: bool) -> Any:
            was_full = handle in names and handle.uses_sharded_strategy and not handle.needs_unshard()
            result = original(state, handle, free_unsharded_flat_param)
            if handle in names:
                emit(names[handle], "reshard", ())
                if was_full and free_unsharded_flat_param:
                    emit(names[handle], "free", ())
            return result

        return reshard

    with ExitStack() as stack:
        stack.enter_context(_replaced(_runtime_utils, "_unshard", watch_unshard))
        stack.enter_context(_replaced(_runtime_utils, "_reshard", watch_reshard))
        yield


def fsdp1_gathered_bytes(model: nn.Module) -> dict[str, int]:
    """Memory of FSDP1's full flat parameters, in compute and in full precision."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found: dict[str, int] = {}
    for fqn, unit in model.named_modules():
        handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
        flat: Any = None if handle is None else handle.flat_param
        whole = [getattr(flat, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
        size = sum(tensor.untyped_storage().size() for tensor in whole if tensor is not None)
        if size:
            found[naming.original(fqn)] = size
    return found


def _groups(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    from torch.distributed.fsdp import FSDPModule

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.extend((module, group) for group in _groups_of(module))
    return found


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp2_units(model: nn.Module) -> Units:
    """Parameter groups in module order, with the parameters of each."""
    by_parameter = {id(parameter): naming.original(fqn) for fqn, parameter in model.named_parameters()}
    names = _names(model)
    return [
        (names[module], tuple(by_parameter.get(id(p.sharded_param), "?") for p in group.fsdp_params))
        for module, group in _groups(model)
    ]


def fsdp2_gathered_bytes(model: nn.Module) -> dict[str, int]:
    """Memory of FSDP2's gathered parameters, and of gathers that nobody has waited for."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, int] = {}
    for fqn, module in model.named_modules():
        for group in _groups_of(module) if isinstance(module, FSDPModule) else ():
            whole = [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]
            if group._all_gather_result is not None and group._all_gather_result.all_gather_output is not None:
                whole.append(group._all_gather_result.all_gather_output)
            size = sum(tensor.untyped_storage().size() for tensor in whole)
            if size:
                found[naming.original(fqn)] = found.get(naming.original(fqn), 0) + size
    return found


@contextmanager
def fsdp2_trace(model: nn.Module, emit: Emit) -> Iterator[None]:
    """Report to `emit` FSDP2's transitions, from the parameter groups' own methods."""
    groups = _groups(model)
    names = _names(model)
    known = {id(group): names[module] for module, group in groups}
    with ExitStack() as stack:
        for name, watch in _FSDP2_WATCHES.items() if groups else ():
            stack.enter_context(_replaced(type(groups[0][1]), name, partial(watch, known, emit)))
        yield


def _watch_unshard(known: Mapping[int, str], emit: Emit, original: Any) -> Any:
    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        name = known.get(id(group))
        idle = group._all_gather_result is None and not _is_full(group)
        if name is not None:
            emit(name, "unshard", ())
        result = original(group, *args, **kwargs)
        if name is not None and idle:
            emit(name, "gather", ())
        return result

    return unshard


def _watch_reshard(known: Mapping[int, str], emit: Emit, original: Any) -> Any:
    def reshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        name = known.get(id(group))
        was_full = _is_full(group)
        result = original(group, *args, **kwargs)
        if name is not None:
            emit(name, "reshard", ())
            if was_full and not _is_full(group):
                emit(name, "free", ())
        return result

    return reshard


def _watch_finalize(known: Mapping[int, str], emit: Emit, original: Any) -> Any:
    def finalize_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
        # A gather that nobody waited for is dropped here: a prefetch that aimed at the wrong unit.
        unclaimed = group._all_gather_result is not None
        result = original(group, *args, **kwargs)
        name = known.get(id(group))
        if name is not None and unclaimed and group._all_gather_result is None:
            emit(name, "free", ())
        return result

    return finalize_backward


_FSDP2_WATCHES = {"unshard": _watch_unshard, "reshard": _watch_reshard, "finalize_backward": _watch_finalize}


def _is_full(group: Any) -> bool:
    return bool(group._sharded_state.name == "UNSHARDED")
