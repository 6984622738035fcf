"""Which backends are there? Six built-in ones, and a vendor's own by entry point or call.

A vendor copies nothing: a `Backend` is a name, a device type and three functions. Entry points of the group
`fsdp_testing.base.backends` give a `Backend` object, loaded when its name is first asked for.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points

from fsdp_testing.base.backends.built_in import BUILT_IN, Backend
from fsdp_testing.errors import InvalidArgument

ENTRY_POINT_GROUP = "fsdp_testing.backends"

_registered: dict[str, Backend] = {backend.name: backend for backend in BUILT_IN}


def register_backend(backend: Backend) -> None:
    """Make `backend` known in this process under its name (ranks learn it through the entry point or a conftest)."""
    _registered[backend.name] = backend


def registered_backends() -> tuple[str, ...]:
    """Return the names that can be asked for, entry points included."""
    return tuple(dict.fromkeys((*_registered, *_entry_point_names())))


@functools.cache
def _entry_point_names() -> tuple[str, ...]:
    """Scanning what is installed takes a millisecond, as long as a test; it does not change while we run."""
    return tuple(point.name for point in entry_points(group=ENTRY_POINT_GROUP))


def backend_named(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        InvalidArgument: For a name nobody registered, or an entry point that does not load to a `Backend`.
    """
    if name not in _registered:
        value = next((point.value for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)
        if value is None:
            known = ", ".join(registered_backends())
            raise InvalidArgument(f"backend: expected one of {known}, got {name!r}. Check the name or register it.")
        _registered[name] = _load(name, value)
    return _registered[name]


def _load(name: str, value: str) -> Backend:
    module, _, attribute = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InvalidArgument(
            f"backend {name!r}: expected {value} to load, got {type(error).__name__}: {error}. "
            "Mend or uninstall the package that registers it."
        ) from error
    if not isinstance(found, Backend):
        raise InvalidArgument(f"backend {name!r}: expected a fsdp_testing.base.backends.Backend, got {found!r}.")
    return found
