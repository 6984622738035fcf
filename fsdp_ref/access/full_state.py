"""How does ``model.state_dict()`` return what the plain module would, and how is such a dict loaded?

Through the module's own state-dict hooks, the same for the wrapper and the composable API and unit by unit: a unit's
parameters are summoned before its module is visited, copied out (or written back) after it, and names lose the wrappers'
prefixes. Every rank gets everything, and all ranks must call.

Other forms (sharded, local, rank 0 only) and optimizer state are not there yet; they raise, naming themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_ref.access.summon import SummonOptions, summon
from fsdp_ref.annotations import unit_of
from fsdp_ref.compat import RunningCall
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.naming import FSDP_WRAPPED_MODULE, clean_tensor_name, join_fqn
from fsdp_ref.runtime.root import close_ended
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import UnitState


class OpenState:
    """What one unit undoes when its part of a state has been collected or loaded.

    The hook that does so does not come when collecting raised: ``collecting`` says so at the unit's next use.
    """

    def __init__(self, summoned: AbstractContextManager[None], *, fresh: bool) -> None:
        self._summoned = summoned
        self._fresh = fresh
        self.collecting = RunningCall.of_outermost_module_method()

    def close(self, unit: Unit) -> None:
        """Keep edits, show and free as before, and forget a root that was only made for this."""
        try:
            self._summoned.__exit__(None, None, None)
        finally:
            if self._fresh and unit.root is not None:
                # Saving must not decide which unit is the root.
                unit.root.disband()


def install(module: nn.Module) -> None:
    """Give the module that users call for a unit its hooks, when the unit is made; a copy of the module has them too."""
    module.register_state_dict_pre_hook(_before_save)
    module.register_state_dict_post_hook(_after_save)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


def not_yet(name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for part of the surface that is not there yet.

    Raises (when called):
        UnsupportedError: always.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name}: expected one of the features that fsdp_ref has, got one that is not there yet. For the model use "
            "state_dict() (full, on every rank); for optimizers copy state inside summon_full_params."
        )

    return refuse


def _enter(module: nn.Module, *, writeback: bool) -> None:
    """Summon the module's own unit, so that beside the state itself only this unit and those around it are full."""
    unit = unit_of(module)
    if unit is None:
        return
    close_ended(unit)
    if unit.state is UnitState.SUMMONED:
        return  # the user has summoned it, and says when edits are kept
    fresh = unit.root is None
    summoned = summon(module, SummonOptions(recurse=False, writeback=writeback))
    summoned.__enter__()
    unit.open_state = OpenState(summoned, fresh=fresh)


def _leave(unit: Unit) -> None:
    open_state, unit.open_state = unit.open_state, None
    if open_state is not None:
        open_state.close(unit)


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _enter(module, writeback=False)


def _after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    unit = unit_of(module)
    if unit is None:
        return
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, clean_tensor_name)
    if unit.open_state is not None:
        _copy_out(unit, state, prefix)
        _leave(unit)


def _copy_out(unit: Unit, state: dict[str, Any], prefix: str) -> None:
    """Replace views of summoned parameters by copies, and buffers that were cast by values in their own dtype."""
    copies: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for key in _managed_keys(unit, prefix):
        value = state.get(key)
        if isinstance(value, Tensor):
            place = (value.data_ptr(), value.shape, value.dtype)
            if place not in copies or not value.numel():
                copies[place] = value.detach().clone()
            state[key] = copies[place]
    names = {child: name for name, child in unit.module.named_modules()}
    for child in unit.modules:
        for name, buffer in child.named_buffers(recurse=False):
            dtype = unit.buffers.original_dtype(child, name)
            key = prefix + clean_tensor_name(join_fqn(names.get(child, ""), name))
            if dtype is not None and dtype != buffer.dtype and key in state:
                state[key] = state[key].to(dtype)


def _managed_keys(unit: Unit, prefix: str) -> Iterator[str]:
    """Yield the keys of the unit's parameters, aliases included, as users know them."""
    if unit.handle is None:
        return
    managed = {id(value) for _, _, value in unit.handle.originals.site_values()}
    for name, param in nn.Module.named_parameters(unit.holder, remove_duplicate=False):
        if id(param) in managed:
            yield prefix + clean_tensor_name(name)


def _rename(state: dict[str, Any], prefix: str, change: Callable[[str], str]) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        value = state.pop(key)
        state[prefix + change(key.removeprefix(prefix))] = value


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _enter(module, writeback=True)
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, lambda name: join_fqn(FSDP_WRAPPED_MODULE, name))


def _after_load(module: nn.Module, incompatible: Any) -> None:
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean_tensor_name(name) for name in names]
    unit = unit_of(module)
    if unit is not None:
        _leave(unit)
