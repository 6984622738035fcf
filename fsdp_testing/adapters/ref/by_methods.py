"""Adapter functions over the methods that `fully_shard` of the reference gives to modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import fsdp_ref
from fsdp_ref.annotations import units_under
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.shared import naming

SETTINGS_OF: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Options of each model's case that `no_sync` and access to its state need."""

_LOCAL: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models inside `no_sync` by methods."""


def set_prefetch(model: nn.Module, setup: Setup) -> None:
    """Name the units that others prefetch, and switch units one by one, where the case asks for it."""
    if "single_units" in setup.settings:
        _reshard_every_second(model, True)
    units: list[Any] = [module for _, module, _ in units_under(model)]
    for place, unit in enumerate(units):
        if setup.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 3])
        if setup.backward_prefetch == "none":
            unit.set_modules_to_backward_prefetch([])
        if setup.backward_prefetch == "post":
            unit.set_modules_to_backward_prefetch(units[max(place - 2, 0) : place][::-1])


def _reshard_every_second(model: nn.Module, first: bool) -> None:
    units: list[Any] = [module for _, module, _ in units_under(model)]
    for place, unit in enumerate(units):
        unit.set_reshard_after_forward(first == (place % 2 == 0), recurse=False)


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """`no_sync`; where the case asks for switches, through the methods of the root."""
    settings = SETTINGS_OF.get(model, frozenset())
    alone = "single_units" in settings
    if not alone and "kept_after_backward" not in settings:
        with fsdp_ref.no_sync(model):
            yield
        return
    if model in _LOCAL:  # inside an outer `no_sync`, which ends it
        yield
        return

    def switch(flag: bool) -> None:
        if alone:
            _reshard_every_second(model, flag)
        model.set_requires_gradient_sync(flag, recurse=not alone)
        if "kept_after_backward" in settings:
            model.set_reshard_after_backward(flag, recurse=not alone)
            model.set_is_last_backward(flag)

    switch(False)
    _LOCAL.add(model)
    try:
        yield
    finally:
        _LOCAL.discard(model)
        switch(True)


def _unit(model: nn.Module, name: str) -> Any:
    return next(module for fqn, module, _ in units_under(model) if naming.original(fqn) == name)


def unshard(model: nn.Module, unit: str) -> None:
    """Gather one unit now. Collectives: an all-gather over its shard group; every rank calls."""
    _unit(model, unit).unshard()


def unshard_async(model: nn.Module, unit: str) -> Callable[[], None] | None:
    """Begin to gather one unit. Collectives: as `unshard`."""
    handle = _unit(model, unit).unshard(async_op=True)
    return None if handle is None else handle.wait


def reshard(model: nn.Module, unit: str) -> None:
    """Free one unit's full parameters."""
    _unit(model, unit).reshard()
