"""Annotations of modules: the APIs applied to a module, and the units in a tree.

A module carries up to three annotations in its ``__dict__``, outside its parameters, buffers and children: its own unit, the
units that own its parameters, and an ordered registry of the composable APIs that were applied to it. They live on the module,
not in a global table, so that they die with it and are copied with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fsdp_ref.errors import FsdpValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from fsdp_ref.runtime.unit import Unit

UNIT_KEY: Final = "_fsdp_ref_unit"
OWNERS_KEY: Final = "_fsdp_ref_owners"
REGISTRY_KEY: Final = "_fsdp_ref_registry"
REPLICATE: Final = "replicate"
"""Name under which the replicating API registers itself."""


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of ``module``: a wrapper module, or a module that the composable API was applied to."""
    return module.__dict__.get(UNIT_KEY)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Make ``module`` known as ``unit`` (bypasses ``__setattr__``, which would register a unit that is a module)."""
    module.__dict__[UNIT_KEY] = unit


def owners_of(module: nn.Module) -> dict[Unit, list[str]]:
    """Return the units that ``module`` is part of, each with the names of the parameters that it owns there; to be added to."""
    owners: dict[Unit, list[str]] = module.__dict__.setdefault(OWNERS_KEY, {})
    return owners


def registry_of(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the composable APIs applied to ``module``, name to state in order of application; None without any."""
    return module.__dict__.get(REGISTRY_KEY)


def register(module: nn.Module, api: str, state: object) -> None:
    """Add ``api`` with its ``state`` to the registry of ``module``."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[api] = state


def unregister(module: nn.Module, api: str) -> None:
    """Undo :func:`register`; a module without any API carries no registry."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    registry.pop(api, None)
    if not registry:
        module.__dict__.pop(REGISTRY_KEY, None)


def is_replicated(module: nn.Module) -> bool:
    """Return whether the replicating API was applied to this very module."""
    return REPLICATE in (registry_of(module) or {})


def walk(root: nn.Module, stop_at: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules as (name, module) in the order of ``named_modules(remove_duplicate=False)``.

    Args:
        root: The first module; its children are always visited.
        stop_at: Whether the walk skips everything below this module. Torch's own walk enters every subtree,
            by generators as deep as the tree: units made from the inside out would cost the third power of their number.
    """
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        yield name, module
        if module is not root and stop_at(module):
            continue
        below = [
            (f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None
        ]
        stack.extend(reversed(below))


def is_unit(module: nn.Module) -> bool:
    """Return whether ``module`` is a unit."""
    return UNIT_KEY in module.__dict__


def units_under(root: nn.Module) -> list[tuple[str, nn.Module, Unit]]:
    """Return every unit at or below ``root`` as (name, module, unit), depth first, without duplicates.

    A replicated subtree, including the units inside it, belongs to another parallelism (pytorch PR 91044).
    """
    units: dict[nn.Module, tuple[str, nn.Module, Unit]] = {}
    for name, module in walk(root, is_replicated):
        if is_replicated(module):
            if module is root:
                break
            continue
        unit = unit_of(module)
        if unit is not None:
            units.setdefault(module, (name, module, unit))
    return list(units.values())


def units_in(root: nn.Module) -> list[Unit]:
    """Return the units at or below ``root``, depth first."""
    return [unit for _, _, unit in units_under(root)]


def outermost_units(module: nn.Module, api: str) -> list[Unit]:
    """Return the units at or below ``module`` that are in no other one.

    Raises:
        FsdpValueError: There is none; the message begins with ``api``.
    """
    own = unit_of(module)
    if own is not None:
        return [own]
    found: list[tuple[str, Unit]] = []
    for name, _, unit in units_under(module):  # depth first: everything below a unit comes right after it
        if not found or not name.startswith(found[-1][0] + "."):
            found.append((name, unit))
    if not found:
        raise FsdpValueError(
            f"{api}: expected a module with units at or below it, got {type(module).__name__} without any. Apply "
            "fully_shard or FullyShardedDataParallel first."
        )
    return [unit for _, unit in found]
