"""How does ``state_dict()`` return what the plain module would, and how is such a dict loaded?

Through the module's own state-dict hooks, the same for the wrapper and the composable API and unit by unit. Every module
that shows parameters of a unit has them, so that the state of any part is full: the outermost one summons the unit, each
copies its own parameters out (or has them written back), and names lose the wrappers' prefixes. Every rank gets
everything, and all ranks must call.

Other forms (sharded, local, rank 0 only) and optimizer state are not there yet; they raise, naming themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_ref.access.summon import SummonOptions, summon
from fsdp_ref.annotations import owners_of, unit_of
from fsdp_ref.compat import RunningCall
from fsdp_ref.config import FullStateDictConfig
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.naming import FSDP_WRAPPED_MODULE, clean_tensor_name, join_fqn
from fsdp_ref.runtime.root import close_ended
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import UnitState


class OpenState:
    """A unit that is summoned while part of a state is collected or loaded.

    The hook that ends it does not come when collecting raised: ``collecting`` says so at the unit's next use.

    Attributes:
        module: the outermost module of that part; its hook ends it.
    """

    def __init__(self, module: nn.Module, summoned: AbstractContextManager[None], *, fresh: bool) -> None:
        self.module = module
        self._summoned = summoned
        self._fresh = fresh
        self._copies: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self.collecting = RunningCall.of_outermost_module_method()

    def copy(self, value: Tensor) -> Tensor:
        """Return a copy of a summoned parameter, whose memory goes; one for all names of a tied parameter."""
        place = (value.data_ptr(), value.shape, value.dtype)
        if place not in self._copies or not value.numel():
            self._copies[place] = value.detach().clone()
        return self._copies[place]

    def close(self, unit: Unit) -> None:
        """Keep edits, show and free as before, and forget a root that was only made for this."""
        try:
            self._summoned.__exit__(None, None, None)
        finally:
            if self._fresh and unit.root is not None:
                # Saving must not decide which unit is the root.
                unit.root.disband()


def install(units: Iterable[Unit]) -> None:
    """Give the modules of new units, and those that users call for them, their hooks; copies of them have hooks too."""
    for unit in units:
        names: dict[nn.Module, list[str]] = {module: [] for module in (unit.holder, *unit.modules)}
        sites = [] if unit.handle is None else [s for managed in unit.handle.originals.managed for s in managed.sites]
        elsewhere = {site.module for site in sites} - set(names)
        if elsewhere:  # a tied parameter, in modules of units below: whoever is around them summons this unit first
            around = [module for module in unit.module.modules() if not elsewhere.isdisjoint(module.modules())]
            names |= {module: [] for module in around if module not in names}
        for site in sites:
            names[site.module].append(site.name)
        for module, params in names.items():
            owners = owners_of(module)
            if not owners:
                module.register_state_dict_pre_hook(_before_save)
                module.register_state_dict_post_hook(_after_save)
                module.register_load_state_dict_pre_hook(_before_load)
                module.register_load_state_dict_post_hook(_after_load)
            owners[unit] = params


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
    """Summon the units that own parameters of the module: beside the state itself only they and those around are full."""
    for unit in reversed(
        owners_of(module)
    ):  # units were made children first, and the outermost decides which is the root
        if unit.handle is None or (unit.open_state is not None and not unit.open_state.collecting.ended()):
            continue
        if unit.state_dict_settings.state_dict_config != FullStateDictConfig():
            not_yet(str(unit.state_dict_settings.state_dict_config))()
        close_ended(unit)
        if unit.state is UnitState.SUMMONED:
            continue  # the user has summoned it, and says when edits are kept
        fresh = unit.root is None
        summoned = summon(unit.holder, SummonOptions(recurse=False, writeback=writeback))
        summoned.__enter__()
        unit.open_state = OpenState(module, summoned, fresh=fresh)


def _leave(module: nn.Module) -> None:
    for unit in owners_of(module):
        open_state = unit.open_state
        if open_state is not None and open_state.module is module:
            unit.open_state = None
            open_state.close(unit)


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _enter(module, writeback=False)


def _after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for unit, names in owners_of(module).items():
        open_state = unit.open_state
        for key in [prefix + name for name in names]:
            if open_state is not None and isinstance(state.get(key), Tensor):
                state[key] = open_state.copy(state[key])
        for name in module._buffers:  # those that were cast in their own dtype
            dtype = unit.buffers.original_dtype(module, name)
            if dtype is not None and prefix + name in state:
                state[prefix + name] = state[prefix + name].to(dtype)
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, clean_tensor_name)
    _leave(module)


def _rename(state: dict[str, Any], prefix: str, change: Callable[[str], str]) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        value = state.pop(key)
        state[prefix + change(key.removeprefix(prefix))] = value


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _enter(module, writeback=True)
    if FSDP_WRAPPED_MODULE in module._modules:
        _rename(state, prefix, lambda name: join_fqn(FSDP_WRAPPED_MODULE, name))


def _after_load(module: nn.Module, incompatible: Any) -> None:
    if unit_of(module) is not None:
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [clean_tensor_name(name) for name in names]
    _leave(module)
