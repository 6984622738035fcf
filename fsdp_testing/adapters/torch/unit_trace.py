"""Watches when torch's FSDP1 and FSDP2 gather and free their units, because neither reports it.

Transitions: `unshard` (asked for), `gather` (memory filled), `reshard` (given up), `free` (memory released). The
functions watched are private; one that a torch release no longer has is reported, not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_testing.adapters.shared import naming
from fsdp_testing.errors import InvalidImplementation

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


@dataclass(frozen=True, slots=True)
class _Watch:
    """The watched parts of one implementation.

    Attributes:
        names: Units by the identity of the object that gathers and frees them.
        occupied: Whether such an object has gathered, or is gathering, its parameters.
        emit: Gets every transition.
    """

    names: Mapping[int, str]
    occupied: Callable[[Any], bool]
    emit: Emit

    @contextmanager
    def calls(self, owner: Any, function: str, place: int, before: str = "", after: str = "") -> Iterator[None]:
        """Report calls of a function, whose argument at `place` is such an object, and their effect on its memory."""

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                name = self.names.get(id(args[place]))
                if name is None:
                    return original(*args, **kwargs)
                full = self.occupied(args[place])
                if before:
                    self.emit(name, before, ())
                result = original(*args, **kwargs)
                if after:
                    self.emit(name, after, ())
                if self.occupied(args[place]) != full:
                    self.emit(name, "free" if full else "gather", ())
                return result

            return call

        with _replaced(owner, function, make):
            yield


def fsdp1_units(model: nn.Module) -> Units:
    """Units with a handle, in FSDP1's order, with the parameters of each."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = _names(model)
    found: Units = []
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is not None:
            name = names[unit]
            prefix = f"{name}." if name else ""
            found.append((name, tuple(prefix + naming.original(fqn) for fqn in handle.flat_param._fqns)))
    return found


@contextmanager
def fsdp1_trace(model: nn.Module, emit: Emit) -> Iterator[None]:
    """Report to `emit` FSDP1's transitions: calls of its unshard and reshard, and their actual effect."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils

    names, units = _names(model), FullyShardedDataParallel.fsdp_modules(model)
    handles = {id(unit._handle): names[unit] for unit in units if unit._handle}
    watch = _Watch(handles, lambda handle: handle.uses_sharded_strategy and not handle.needs_unshard(), emit)
    with (
        watch.calls(_runtime_utils, "_unshard", 1, before="unshard"),
        watch.calls(_runtime_utils, "_reshard", 1, after="reshard"),
    ):
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
    """Memory of FSDP2's gathered parameters, and of gathers that were not waited for."""
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


def fsdp2_unreduced(model: nn.Module) -> tuple[str, ...]:
    """Parameters with a gradient that `set_requires_gradient_sync(False)` left on its rank, for a later backward to reduce."""
    names = {id(parameter): naming.original(fqn) for fqn, parameter in model.named_parameters()}
    found = [p for _, group in _groups(model) for p in group.fsdp_params]
    return tuple(
        names.get(id(p.sharded_param)) or names.get(id(getattr(p, "_unsharded_param", None)), "?")
        for p in found
        if p.unsharded_accumulated_grad is not None
        or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
    )


def fsdp2_unsharded(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, shard and whole value of each parameter that is unsharded; without those with a gather of their own."""
    names = {id(parameter): naming.original(fqn) for fqn, parameter in model.named_parameters()}
    for _, group in _groups(model):
        for p in group.fsdp_params if group._sharded_state.name == "UNSHARDED" else ():
            own = hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")
            if not own:
                yield names.get(id(p._unsharded_param), "?"), p.sharded_param, p._unsharded_param


@contextmanager
def fsdp2_trace(model: nn.Module, emit: Emit) -> Iterator[None]:
    """Report to `emit` FSDP2's transitions, from the parameter groups' own methods."""
    groups, names = _groups(model), _names(model)
    watch = _Watch({id(group): names[module] for module, group in groups}, _is_gathered, emit)
    with ExitStack() as stack:
        for owner in {type(group) for _, group in groups}:
            stack.enter_context(watch.calls(owner, "unshard", 0, before="unshard"))
            stack.enter_context(watch.calls(owner, "reshard", 0, after="reshard"))
            # A gather that was not waited for is dropped there: a prefetch of the wrong unit.
            stack.enter_context(watch.calls(owner, "finalize_backward", 0))
        yield


def _is_gathered(group: Any) -> bool:
    return group._all_gather_result is not None or bool(group._sharded_state.name == "UNSHARDED")
