"""How does a function named in one process become the same function in another? By module and qualified name.

Code never travels: a lambda, a closure or a function of an interactive session has no name that a rank could import,
and is refused with the reason before anything is sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from fsdp_testing.errors import UnsendableFunction

_MAIN_COPY = "__rank_main__"


@dataclass(frozen=True, slots=True)
class Target:
    """A function by name: `module` and `qualname`, and the source `path` when the module has one."""

    module: str
    qualname: str
    path: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


def target_of(function: Callable[..., Any] | str) -> Target:
    """Name `function` so that a rank can import it.

    Args:
        function: an importable function, or its name as "package.module:function".

    Raises:
        UnsendableFunction: for a lambda, a nested function, or one that its module does not hold under its name.
    """
    if isinstance(function, str):
        module, colon, qualname = function.partition(":")
        if not colon or not module or not qualname:
            raise UnsendableFunction(
                f"target: expected 'package.module:function', got {function!r}. Name the module and the function."
            )
        return Target(module, qualname)
    qualname = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "") or ""
    if not qualname or not module:
        raise UnsendableFunction(
            f"target: expected an importable function, got {function!r}. Pass a module-level function and its "
            "arguments separately."
        )
    if "<" in qualname:
        kind = "a lambda" if "<lambda>" in qualname else "defined inside another function"
        raise UnsendableFunction(
            f"target: expected a function that another process can import, got {module}.{qualname}, which is {kind}. "
            "Move it to module level and pass what it closed over as arguments."
        )
    _check_reachable(function, module, qualname)
    return Target(module, qualname, _source_path(module))


def _check_reachable(function: Callable[..., Any], module: str, qualname: str) -> None:
    holder = sys.modules.get(module)
    try:
        found = reduce(getattr, qualname.split("."), holder)
    except AttributeError:
        found = None
    if found is function or getattr(found, "__wrapped__", None) is function:
        return
    if isinstance(found, types.MethodType) and found.__func__ is getattr(function, "__func__", None):
        return
    raise UnsendableFunction(
        f"target: expected {module}.{qualname} to name the function itself, got {found!r}. A decorator that returns "
        "something else, or a redefinition, hides it; pass the object that the module holds."
    )


def _source_path(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and path is None:
        raise UnsendableFunction(
            "target: expected a function of a module that ranks can import, got one of an interactive session. "
            "Put it into a file."
        )
    return os.path.abspath(path) if path else None


def resolve(target: Target) -> Callable[..., Any]:
    """Import what `target` names, in a rank.

    Raises:
        UnsendableFunction: when the module imports but does not hold the name.
        ImportError: when the module cannot be imported here either by name or from its path.
    """
    module = _import(target)
    try:
        found = reduce(getattr, target.qualname.split("."), module)
    except AttributeError:
        raise UnsendableFunction(
            f"target {target}: expected module {target.module} to hold {target.qualname}, and it does not in this "
            "rank. It may be defined only when run as a script, or changed since the test was collected."
        ) from None
    if not callable(found):
        raise UnsendableFunction(f"target {target}: expected a callable, got {type(found).__name__}.")
    return found


def _import(target: Target) -> Any:
    if target.module == "__main__":
        return _import_main(target.path)
    known = sys.modules.get(target.module)
    if known is not None:
        return known
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if target.path is None or error.name is None or not target.module.startswith(error.name):
            raise
    spec = importlib.util.spec_from_file_location(target.module, target.path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot import {target.module} from {target.path}", name=target.module)
    module = importlib.util.module_from_spec(spec)
    sys.modules[target.module] = module
    spec.loader.exec_module(module)
    return module


def _import_main(path: str | None) -> types.ModuleType:
    """Run the controller's script once under another name, so that its `__main__` guard stays closed."""
    if _MAIN_COPY in sys.modules:
        return sys.modules[_MAIN_COPY]
    if path is None:
        raise ModuleNotFoundError("the controller's __main__ has no file to import")
    spec = importlib.util.spec_from_file_location(_MAIN_COPY, path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot import the controller's script {path}")
    module = importlib.util.module_from_spec(spec)
    # Classes pickled in the controller are named __main__.X: both names must lead to the copy before it runs.
    sys.modules[_MAIN_COPY] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
