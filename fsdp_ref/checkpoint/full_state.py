"""How does ``model.state_dict()`` return what the plain module would, and how is such a dict loaded?

Through the module's own state-dict hooks, the same for the wrapper and the composable API: parameters are summoned
before the module is visited, copied out (or written back) after it, and names lose the wrappers' prefixes. Every rank
gets everything, and all ranks must call.

Other forms (sharded, local, rank 0 only) and optimizer state are not there yet; they raise, naming themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_ref.annotations import unit_of, units_under
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.naming import FSDP_WRAPPED_MODULE, clean_tensor_name, join_fqn
from fsdp_ref.runtime.summon import SummonOptions, summon
from fsdp_ref.states import TrainingState


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
    unit = unit_of(module)
    if unit is None or unit.training_state is TrainingState.SUMMON_FULL_PARAMS:
        return  # a unit above has summoned everything below it, or the user has
    fresh = unit.root is None
    context = summon(module, SummonOptions(writeback=writeback))
    context.__enter__()
    unit.summoned_for_state = (context, fresh)


def _leave(module: nn.Module) -> None:
    unit = unit_of(module)
    if unit is None or unit.summoned_for_state is None:
        return
    (context, fresh), unit.summoned_for_state = unit.summoned_for_state, None
    try:
        context.__exit__(None, None, None)
    finally:
        if fresh and unit.root is not None:
            # Saving must not decide which unit is the root.
            unit.root.disband()


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _enter(module, writeback=False)


def _after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    unit = unit_of(module)
    if unit is None:
        return
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, clean_tensor_name)
    if unit.summoned_for_state is not None:
        _copy_out(module, state, prefix)
        _leave(module)


def _copy_out(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace views of summoned parameters by copies, and buffers that were cast by values in their own dtype."""
    copies: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for key in _managed_keys(module, prefix):
        value = state.get(key)
        if isinstance(value, Tensor):
            place = (value.data_ptr(), value.shape, value.dtype)
            if place not in copies or not value.numel():
                copies[place] = value.detach().clone()
            state[key] = copies[place]
    for path, holder, unit in units_under(module):
        inside = path if unit.module is holder else join_fqn(path, FSDP_WRAPPED_MODULE)
        names = {child: join_fqn(inside, name) for name, child in unit.module.named_modules()}
        for child in unit.modules:
            for name, buffer in child.named_buffers(recurse=False):
                dtype = unit.buffers.original_dtype(child, name)
                key = prefix + clean_tensor_name(join_fqn(names.get(child, ""), name))
                if dtype is not None and dtype != buffer.dtype and key in state:
                    state[key] = state[key].to(dtype)


def _managed_keys(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the keys of all managed parameters, aliases included, as users know them."""
    managed = {
        id(value)
        for _, _, unit in units_under(module)
        if unit.handle is not None
        for _, _, value in unit.handle.originals.site_values()
    }
    for name, param in nn.Module.named_parameters(module, remove_duplicate=False):
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
    _leave(module)
