"""The form that state dicts of a tree have: who sets it, and for how long.

Each unit has its own settings, so that a mixed tree may save each part in its own form; users set them for all units at or
below a module. torch's enum and configuration objects are accepted. Nothing here communicates.
Source: ``torch.distributed.fsdp.FullyShardedDataParallel`` for names, order of arguments, defaults and errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from torch import nn

from fsdp_ref.annotations import outermost_units, units_under
from fsdp_ref.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    coerce_config,
    coerce_enum,
)
from fsdp_ref.errors import FsdpAssertionError, FsdpRuntimeError, listing
from fsdp_ref.runtime.unit import Unit

C = TypeVar("C", StateDictConfig, OptimStateDictConfig)

_CONFIGS: Final[dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the form of state dicts for every unit at or below ``module``.

    Args:
        module: Any module with units at or below it.
        state_dict_type: The form, of this package or torch's.
        state_dict_config: Options of that form for the model's state. Default: those of its class.
        optim_state_dict_config: The same for the optimizer's state.

    Returns:
        The previous settings of the outermost unit.

    Raises:
        ConfigTypeError: ``state_dict_type`` is not such a form, or an option is unknown.
        FsdpRuntimeError: Options of another form.
        FsdpValueError: There is no unit.
        FsdpAssertionError: Units have different forms, so there is no single previous value. Nothing is changed.
    """
    settings = _settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
    units = _units(module)
    _agree(units, [unit.state_dict_settings.state_dict_type for _, unit in units])
    previous = units[0][1].state_dict_settings
    for _, unit in units:
        unit.state_dict_settings = settings
    return previous


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of the units at or below ``module``.

    Raises:
        FsdpValueError: There is no unit.
        FsdpAssertionError: Units have different settings.
    """
    units = _units(module)
    _agree(units, [unit.state_dict_settings for _, unit in units])
    return units[0][1].state_dict_settings


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the form of state dicts inside the context; afterwards each unit's own form is restored, even after an exception.

    Arguments and errors as for :func:`set_state_dict_type`, but units may have different forms before.
    """
    settings = _settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
    before = [(unit, unit.state_dict_settings) for _, unit in _units(module)]
    for unit, _ in before:
        unit.state_dict_settings = settings
    try:
        yield
    finally:
        for unit, previous in before:
            unit.state_dict_settings = previous


def _settings_of(form: object, model: object, optim: object) -> StateDictSettings:
    chosen = coerce_enum(StateDictType, form, where="state_dict_type")
    model_class, optim_class = _CONFIGS[chosen]
    return StateDictSettings(
        chosen,
        _config(model_class, model, chosen, "state_dict_config"),
        _config(optim_class, optim, chosen, "optim_state_dict_config"),
    )


def _config(cls: type[C], value: object, form: StateDictType, where: str) -> C:
    if value is None:
        return cls()
    if not isinstance(value, cls) and type(value).__name__ != cls.__name__:
        raise FsdpRuntimeError(
            f"Expected {where} of type {cls.__name__} for {form.name}, but got {type(value).__name__}. Pass the "
            f"options of the current form."
        )
    return coerce_config(cls, value, where=where)


def _units(module: nn.Module) -> list[tuple[str, Unit]]:
    outermost_units(module, "state_dict_type")  # there is one
    return [(name, unit) for name, _, unit in units_under(module)]


def _agree(units: list[tuple[str, Unit]], values: list[object]) -> None:
    odd = [f"{name or 'root'}: {value}" for (name, _), value in zip(units, values) if value != values[0]]
    if odd:
        raise FsdpAssertionError(
            f"All FSDP modules must have the same state dict settings: expected {values[0]} everywhere, as in "
            f"{units[0][0] or 'the root'!r}, got {listing(odd)}. Ask and set each of them on its own, or use the "
            "context state_dict_type, which restores each."
        )
