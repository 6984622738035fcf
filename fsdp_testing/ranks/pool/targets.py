"""Names a function so that another process finds the same one: by module and qualified name.

Code never travels: a lambda, a closure or a function of an interactive session has no name that a rank could import,
and is refused with the reason before anything is sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from fsdp_testing.errors import UnsendableFunction

#: Name of the controller's script while a rank runs it; results call it `__main__` again.
MAIN_COPY = "__rank_main__"
_MOST_DECORATORS = 50

replaced_modules: set[str] = set()
"""Names under which `resolve` replaced one module by another: files of one name in different folders."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function by name: `module` and `qualname`, and the source `path` when the module has one.

    `unwrap` counts the decorators to take off (`__wrapped__`) when the function meant is not the one the name leads to.
    """

    module: str
    qualname: str
    path: str | None = None
    unwrap: int = 0

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


def target_of(function: Callable[..., Any] | str) -> Target:
    """Name `function` so that a rank can import it.

    Args:
        function: An importable function, or its name as "package.module:function".

    Raises:
        UnsendableFunction: For a lambda, a nested function, or one that its module does not hold under its name.
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
            "Move it to module level and pass its closure variables as arguments."
        )
    return Target(module, qualname, _source_path(module), _depth(function, module, qualname))


def _depth(function: Callable[..., Any], module: str, qualname: str) -> int:
    """Return how many decorators lie between what the name leads to and `function`."""
    target: Any = sys.modules.get(module)
    try:
        target = reduce(getattr, qualname.split("."), target)
    except AttributeError:
        target = None
    if isinstance(target, types.MethodType) and target.__func__ is getattr(function, "__func__", None):
        return 0
    inner, depth = target, 0
    while inner is not None and depth < _MOST_DECORATORS:
        if inner is function:
            return depth
        inner, depth = getattr(inner, "__wrapped__", None), depth + 1
    if isinstance(function, types.MethodType):
        raise UnsendableFunction(
            f"target: expected a function that another process can import, got {module}.{qualname} bound to an object. "
            "Pass a module-level function, and the object as an argument."
        )
    raise UnsendableFunction(
        f"target: expected {module}.{qualname} to name the function itself, got {target!r}. A decorator that returns "
        "something else, or a redefinition, hides it; pass the object that the module holds."
    )


def _source_path(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and path is None:
        raise UnsendableFunction(
            "target: expected a function of a module that ranks can import, got one of an interactive session. "
            "Put it into a file."
        )
    return str(Path(path).absolute()) if path else None


def resolve(target: Target) -> Callable[..., Any]:
    """Import what `target` names, in a rank.

    Raises:
        UnsendableFunction: When the module imports but does not hold the name.
        ImportError: When the module cannot be imported here either by name or from its path.
    """
    module = _import(target)
    try:
        function = reduce(getattr, target.qualname.split("."), module)
    except AttributeError:
        raise UnsendableFunction(
            f"target {target}: expected module {target.module} to hold {target.qualname}, but it does not in this "
            f"rank. It may be defined only when run as a script, or changed since the test was collected."
        ) from None
    for _ in range(target.unwrap):
        function = function.__wrapped__
    if not callable(function):
        raise UnsendableFunction(f"target {target}: expected a callable, got {type(function).__name__}.")
    return function


def _import(target: Target) -> Any:
    if target.module == "__main__":
        return _import_main(target.path)
    module = sys.modules.get(target.module)
    if module is not None and not _is_other(module, target.path):
        return module
    if module is not None:
        return _load(target.module, target.path, target.module)
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if target.path is None or error.name is None or not target.module.startswith(error.name):
            raise
    return _load(target.module, target.path, target.module)


def _is_other(module: types.ModuleType, path: str | None) -> bool:
    """Return whether the module of that name belongs to another file: two test folders may hold files of one name."""
    file = getattr(module, "__file__", None)
    if path is None or file is None or not path.endswith(".py"):
        return False
    return str(Path(file).absolute()) != path and Path(file).resolve() != Path(path).resolve()


def _load(name: str, path: str | None, *names: str) -> types.ModuleType:
    """Run the file at `path` as module `name`, known under all of `names` from its first line on."""
    spec = importlib.util.spec_from_file_location(name, path) if path is not None else None
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot import {name} from {path}", name=name)
    module = importlib.util.module_from_spec(spec)
    _add_parents(name)
    before = {alias: sys.modules.get(alias) for alias in names}
    replaced_modules.update(alias for alias, old in before.items() if old is not None)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # The next call must not find a half-run module.
        for alias, old in before.items():
            if old is None:
                sys.modules.pop(alias, None)
            else:
                sys.modules[alias] = old
        raise
    return module


def _add_parents(name: str) -> None:
    """Register the parent packages of `name`, empty if they cannot be imported, as pytest's importlib mode does.

    Without them nothing of the module can be pickled: `__import__("tests.test_x")` looks for `tests` even when
    `tests.test_x` is known.
    """
    parent = name.rpartition(".")[0]
    if not parent or parent in sys.modules:
        return
    _add_parents(parent)
    try:
        importlib.import_module(parent)
    except ImportError:
        sys.modules[parent] = types.ModuleType(parent, "A folder of tests that is not an importable package.")


def _import_main(path: str | None) -> types.ModuleType:
    """Run the controller's script once under another name, so that its `__main__` guard stays closed."""
    if MAIN_COPY in sys.modules:
        return sys.modules[MAIN_COPY]
    if path is None:
        raise ModuleNotFoundError("the controller's __main__ has no file to import")
    # Classes pickled in the controller are named __main__.X: both names must lead to the copy before it runs.
    return _load(MAIN_COPY, path, MAIN_COPY, "__main__")
