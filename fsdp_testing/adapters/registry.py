"""Finds the implementation that a name means.

A name is built in, registered by an installed distribution under the entry-point group
`fsdp_testing.implementations`, or an import string `package.module:attribute`. Nothing is imported until a name is
loaded, so that one broken adapter breaks only those who ask for it.

A name is loaded once, where it enters (`load`), and the adapter is passed on. To another process an adapter travels as
its name: pickling writes `Adapter.reference`, and unpickling asks `adapter_of`, which loads each name once per process.
"""

from __future__ import annotations

import copyreg
import difflib
import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.registrations import BUILT_IN, ENTRY_POINT_GROUP, Registration, names, registrations
from fsdp_testing.adapters.slow_imports import importing
from fsdp_testing.errors import InvalidArgument, InvalidImplementation, UnknownImplementation

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Registration",
    "adapter_of",
    "load",
    "modules_of",
    "names",
    "registrations",
]


def load(name: object) -> Adapter:
    """Load the implementation of that name or import string, completed; it remembers the name as its `reference`.

    Raises:
        UnknownImplementation: No such name; near ones are listed.
        InvalidImplementation: It cannot be imported, is registered by two distributions, or is no implementation.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(
            f"implementation: expected a name or `package.module:attribute`, got {name!r}. Give a string."
        )
    registered = registrations().get(name, ())
    if len(registered) > 1:
        claimants = ", ".join(f"{r.origin} ({r.target})" for r in registered)
        raise InvalidImplementation(
            f"implementation {name!r}: expected one registration, got {len(registered)}: {claimants}. "
            "Uninstall all but one, or give the import string of the right one."
        )
    if registered:
        where = f"implementation {name!r} of {registered[0].origin}"
        return replace(_completed(registered[0].target, where, name), reference=name)
    if ":" in name:
        return replace(_completed(name, f"implementation {name!r}", None), reference=name)
    known = names()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "Give one of these or an import string."
    raise UnknownImplementation(
        f"implementation: expected one of {', '.join(known)} or `package.module:attribute`, got {name!r}. {hint}"
    )


@functools.cache
def _loaded(reference: str) -> Adapter:
    return load(reference)


def adapter_of(implementation: str | Adapter) -> Adapter:
    """Return the adapter itself, or the adapter with that reference, which is loaded once per process.

    Raises:
        UnknownImplementation: As `load`.
        InvalidImplementation: As `load`.
    """
    return implementation if isinstance(implementation, Adapter) else _loaded(implementation)


def modules_of(reference: str) -> list[str]:
    """Return the modules through which an implementation of that name or import string is found; it was loaded before.

    An import string may lead to another import string, and the last to an object whose class another module defines.
    """
    # Every case asks this, and entry points are slow to read.
    known = BUILT_IN.get(reference) or next((r.target for r in registrations().get(reference, ())), "")
    found: Any = known or reference
    modules = []
    while isinstance(found, str):
        module, _, path = found.partition(":")
        modules.append(module)
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    return [*modules, str(getattr(found, "__module__", ""))]


def _by_reference(adapter: Adapter) -> tuple[Callable[..., Adapter], tuple[str]]:
    """Pickles an adapter by its name: its methods are closures, which another process can only find by name."""
    if not adapter.reference:
        raise InvalidImplementation(
            f"implementation {adapter.name!r}: expected an adapter loaded by its name or import string, got one made from "
            "an object, which a rank cannot find. Pass the name under which it is registered, or `package.module:attribute`."
        )
    return adapter_of, (adapter.reference,)


copyreg.pickle(Adapter, _by_reference)


def _completed(target: str, where: str, registered_name: str | None) -> Adapter:
    found = _resolve(target, where, hops=3)
    if not hasattr(found, "wrap") and callable(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise InvalidImplementation(
                f"{where}: expected {target} to return an implementation, got {_text_of(error)}. Correct the adapter."
            ) from error
    adapter = Adapter.of(found)
    if registered_name is not None and adapter.name != registered_name:
        raise InvalidImplementation(
            f"{where}: expected an implementation named {registered_name!r}, got one named {adapter.name!r}. "
            "Give the adapter the name under which it is registered."
        )
    return adapter


def _resolve(target: str, where: str, hops: int) -> Any:
    """Import `module:attribute`; the attribute may itself be an import string."""
    module_name, separator, path = target.partition(":")
    if not (separator and module_name and path):
        raise InvalidImplementation(f"{where}: expected `package.module:attribute`, got {target!r}. Correct the entry.")
    try:
        with importing(module_name, where):
            found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except InvalidImplementation:
        raise
    except (Exception, SystemExit) as error:  # an exit code is this command's own verdict
        raise InvalidImplementation(
            f"{where}: expected {target} to be importable, got {_text_of(error)}. "
            "Correct the adapter or install what it needs."
        ) from error
    if isinstance(found, str):
        if hops == 0:
            raise InvalidImplementation(
                f"{where}: expected an adapter, got import strings that lead to one another. Correct one."
            )
        return _resolve(found, where, hops - 1)
    return found


def _text_of(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
