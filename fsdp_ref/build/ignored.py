"""Modules and parameters that the user wants left alone.

Ignored modules keep plain parameters: not flattened, not sharded, not reduced. Everything below an ignored module is
ignored too, except existing units, which stay managed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_ref.annotations import is_replicated, is_unit, unit_of, walk
from fsdp_ref.errors import FsdpTypeError, FsdpValueError, listing

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Ignored:
    """Modules and parameters that a unit and everything above it leave alone (compared by identity)."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()

    def union(self, others: Iterable[Ignored]) -> Ignored:
        """Return these together with ``others`` (a parent inherits what its nested units ignore)."""
        # Units of one call share one object, and most ignore nothing, which avoids a union for each unit.
        different = {id(other): other for other in others if other.modules or other.params}
        if not different:
            return self
        modules, params = set(self.modules), set(self.params)
        for other in different.values():
            modules |= other.modules
            params |= other.params
        return Ignored(frozenset(modules), frozenset(params))


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> Ignored:
    """Read the two ways of saying what to ignore, and add replicated subtrees.

    Args:
        root: the module that sharding is applied to.
        ignored_modules: modules; consumed once, may lie outside ``root``.
        ignored_states: all parameters or all modules.

    Raises:
        FsdpTypeError: an argument that cannot be iterated.
        FsdpValueError: both arguments, elements of a wrong or mixed type, or a module that is itself a unit.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise FsdpValueError(
            "FullyShardedDataParallel: expected one of ignored_modules and ignored_states, got both. "
            "Cannot pass both ignored_modules and ignored_states at the same time; pass ignored_states."
        )
    modules, states = _elements("ignored_modules", ignored_modules), _elements("ignored_states", ignored_states)
    explicit = [state for state in states if isinstance(state, nn.Parameter)]
    if not all(isinstance(module, nn.Module) for module in modules):
        raise FsdpValueError(
            f"FullyShardedDataParallel: ignored_modules expects nn.Module list elements but got types "
            f"{_types_of(modules)}. Pass parameters as ignored_states."
        )
    modules += [state for state in states if isinstance(state, nn.Module)]
    if states and len(states) not in {len(explicit), len(modules)}:
        raise FsdpValueError(
            "FullyShardedDataParallel: ignored_states expects all nn.Parameter or all nn.Module list elements "
            f"but got types {_types_of(states)}. Pass one kind."
        )
    _refuse_units(modules)
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            "parameters being ignored and is not well supported: " + type(root).__name__,
            UserWarning,
            stacklevel=3,
        )
    # Existing units are not searched: they already know what they ignore (``Ignored.union``).
    found = dict.fromkeys(module for _, module in walk(root, has_its_own))
    roots = [*modules, *(module for module in found if module is not root and is_replicated(module))]
    below = {child for module in roots for child in module.modules() if unit_of(child) is None or is_replicated(module)}
    inside = {param for module in below for param in module.parameters(recurse=False)}
    return Ignored(frozenset(below), frozenset(inside.union(explicit)))


def has_its_own(module: nn.Module) -> bool:
    """Return whether an API was already applied to ``module``, so that it knows what it ignores."""
    return is_unit(module) or is_replicated(module)


def _elements(name: str, values: Iterable[Any] | None) -> list[Any]:
    try:
        return [] if values is None else list(values)
    except TypeError:
        raise FsdpTypeError(
            f"FullyShardedDataParallel: `{name}` should be an iterable of modules or parameters, "
            f"got {type(values).__name__}. Pass a list."
        ) from None


def _refuse_units(modules: list[nn.Module]) -> None:
    units = [type(module).__name__ for module in modules if unit_of(module) is not None]
    if units:
        raise FsdpValueError(
            f"FullyShardedDataParallel: `ignored_modules` should not include FSDP modules, got {listing(units)}. "
            "Ignore the plain modules inside, or do not shard these."
        )


def _types_of(values: list[object]) -> str:
    return str(sorted({str(type(value)) for value in values}))
