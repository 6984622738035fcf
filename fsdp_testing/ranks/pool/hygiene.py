"""Compares a rank's state before and after a job, and restores what can be restored.

Cheap comparisons come first: for a clean job, a few hundred values are read twice. Only a difference is examined, named
and undone. Random generators are not compared: every job starts from seeds, so that a test draws the same numbers alone,
in any order, and on a kept or a new rank.

Names are compared too: removed or replaced modules, and replaced functions. The comparison watches namespaces of torch and of
Python in which tests replace things, and the code under test: every module, with its classes, that comes neither with Python
nor with torch nor from an installed package. A dictionary's version says whether it changed since the last reading; its
contents are read only then.
"""

from __future__ import annotations

import gc
import importlib
import pathlib
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.base import compat, torch_state
from fsdp_testing.ranks.pool import targets
from fsdp_testing.ranks.pool.hygiene_leftovers import LEFTOVER_PROBES, LIMITS, Probe
from fsdp_testing.ranks.pool.hygiene_registries import REGISTRY_PROBES
from fsdp_testing.ranks.pool.hygiene_settings import INSTALLED, PYTHON_PROBES
from fsdp_testing.ranks.pool.hygiene_torch import TORCH_PROBES
from fsdp_testing.ranks.pool.outcome import Dirt

_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
# torch wraps functions of these namespaces on first use, for good: the compiler, and whoever makes an optimizer.
_WRAPS = (
    "/torch/_dynamo/",
    "/torch/_compile.py",
    "/torch/_inductor/",
    "/torch/_functorch/",
    "/torch/optim/optimizer.py",
)
_TORCHS = (
    torch.nn.functional, dist, torch.nn.Module, torch.Tensor, torch.autograd, torch, torch.nn, torch.optim,
    torch.nn.init, torch.nn.Linear, torch.optim.Optimizer, dist.ProcessGroup,
)  # fmt: skip
_MORE = (
    "torch.distributed.distributed_c10d", "torch.utils.checkpoint", "torch.cuda", "torch.linalg", "torch.testing",
    "torch.fft", "torch.special", "torch.nn.utils", "torch.multiprocessing", "torch.serialization",
    "time", "os", "os.path", "shutil", "tempfile", "json", "copy", "math", "signal", "random", "io", "glob",
    "numpy", "numpy.random", "uuid", "inspect", "functools", "contextlib", "pickle", "datetime", "logging",
)  # fmt: skip
_WITH_CLASSES = (
    "torch.optim", "torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.utils.data", "torch.utils.data.distributed",
    "torch.amp", "torch.nn.parallel", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.tensor.parallel", "torch.distributed.device_mesh", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict", "torch.distributions", "threading", "socket", "subprocess",
)  # fmt: skip
"""Watched with the public classes that they show."""
# Not `warnings`: pytest replaces its functions around each test, and while a fixture of several tests ends.
_NAMED = 5
_NOTHING = object()
_COMPILED = "__compiled_fn_", "__resume_at_"
"""How names begin that torch's compiler puts beside the code it compiled, and takes away once it is reset."""

#: What a namespace holds, by name: its callables, and None for anything else, so that no tensor is kept alive.
Content = dict[str, Any]


class _Namespace:
    """A module, a class, or the table of modules, and its contents at the last reading."""

    __slots__ = ("_all", "_content", "_names", "_state", "_values", "_version", "place")

    def __init__(self, owner: Any, names: dict[str, Any], *, everything: bool = False) -> None:
        self.place = owner
        self._names = names
        self._all = everything
        self._state = compat.state_of_dictionary(names)
        self._version: object = None
        self._values: tuple[Any, ...] = ()
        self._content: Content = {}

    def read(self) -> Content:
        version = self._state.value
        return self._content if version == self._version else self._read_again(version)

    def _read_again(self, version: object) -> Content:
        self._version = version
        if isinstance(self._state, compat.Unversioned):
            values = tuple(self._names.values())
            if values == self._values and len(self._content) == len(values):
                return self._content
            self._values = values
        named = list(self._names.items())
        self._content = {name: v if self._all or _is_watched(name, v) else None for name, v in named}
        return self._content


def _is_watched(name: str, value: Any) -> bool:
    return issubclass(type(value), _CALLABLE) and not name.startswith(_COMPILED)


class _Watched:
    """All namespaces. Only grows, at the end: a reading is compared with an earlier, shorter one."""

    def __init__(self) -> None:
        self.modules = _Namespace(sys.modules, sys.modules, everything=True)
        self.all: list[_Namespace] = []
        self._known: set[str] = set()
        self._there: set[int] = set()
        for owner in (*_TORCHS, pathlib.Path, random.Random):
            self._watch(owner)

    def current(self) -> list[_Namespace]:
        """Return all namespaces, including those of newly imported modules."""
        if len(sys.modules) != len(self._known):
            for name, module in list(sys.modules.items()):
                if name not in self._known:
                    self._known.add(name)
                    self._add(name, module)
        return self.all

    def _add(self, name: str, module: Any) -> None:
        if name in (*_MORE, *_WITH_CLASSES) and isinstance(module, types.ModuleType):
            self._watch(module)
        if name in _WITH_CLASSES and isinstance(module, types.ModuleType):
            for public, value in list(vars(module).items()):
                if issubclass(type(value), type) and not public.startswith("_"):
                    self._watch(value)
        if not isinstance(module, types.ModuleType) or module.__name__.partition(".")[0] == "fsdp_testing":
            return
        file = vars(module).get("__file__")
        if not isinstance(file, str) or not file.endswith(".py") or any(part in file for part in INSTALLED):
            return
        self._watch(module)
        for value in list(vars(module).values()):
            # Not `isinstance`: it asks a value that is no class for its `__class__`, which runs code of the value.
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                self._watch(value)

    def _watch(self, owner: Any) -> None:
        if id(owner) not in self._there:
            self._there.add(id(owner))
            names = vars(owner)
            # A class shows its dictionary through a proxy.
            own = names if isinstance(names, dict) else next(d for d in gc.get_referents(names) if isinstance(d, dict))
            self.all.append(_Namespace(owner, own))


_watched = _Watched()


def _contents() -> list[Content]:
    namespaces = _watched.current()
    # In full length: a list that grows leaves blocks to the allocator.
    contents: list[Content] = [{}] * len(namespaces)
    for place, namespace in enumerate(namespaces):
        contents[place] = namespace.read()
    return contents


def _modules() -> Content:
    return _watched.modules.read()


def remember() -> None:
    """Read everything once, in the process that ranks are forked from, so that ranks need not touch unchanged namespaces."""
    _contents(), _modules()


def _replaced(before: list[Content], now: list[Content]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (namespace, name, earlier value) for each callable that another object has replaced.

    The earlier value is `_NOTHING` where a class hides what it inherits.
    """
    for namespace, old, new in zip(_watched.all, before, now):
        if old is new:
            continue
        owner, names = namespace.place, vars(namespace.place)
        for name, value in old.items():
            if value is not None and new.get(name) is not value and not _wrapped_by_torch(names.get(name)):
                yield owner, name, value
        for name in [name for name in new if name not in old] if isinstance(owner, type) else ():
            inherited = any(callable(vars(base).get(name)) for base in owner.__mro__[1:])
            if inherited and not _wrapped_by_torch(names[name]):
                yield owner, name, _NOTHING


def _wrapped_by_torch(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and any(part in code.co_filename for part in _WRAPS)


def _tell_contents(before: list[Content], now: list[Content]) -> Iterator[str]:
    by_place: dict[str, list[str]] = {}
    for namespace, name, value in _replaced(before, now):
        owner = (
            f"{namespace.__module__}.{namespace.__qualname__}" if isinstance(namespace, type) else namespace.__name__
        )
        was = "was inherited" if value is _NOTHING else repr(value)
        by_place.setdefault(owner, []).append(f"{name}: {was} -> {vars(namespace).get(name)!r}")
    for owner, changes in by_place.items():
        yield from (f"{owner}.{change}" for change in changes[:_NAMED])
        if more := [change.partition(":")[0] for change in changes[_NAMED:]]:
            yield f"{owner}: {len(more)} more names ({', '.join(more[:_NAMED])}{', ...' if more[_NAMED:] else ''})"


def _put_contents(before: list[Content], now: list[Content]) -> None:
    for owner, name, value in list(_replaced(before, now)):
        if value is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _lost_modules(before: Content, now: Content) -> list[str]:
    # A file of the same name in another folder replaced it when the controller asked for one of its functions.
    return [
        name
        for name, module in before.items()
        if now.get(name) is not module
        and name not in targets.replaced_modules
        and not (_holds_modules_alone(module) and _holds_modules_alone(now.get(name)))
    ]


def _holds_modules_alone(module: Any) -> bool:
    """Whether it is a package without code: setuptools, once imported, replaces such a `backports`."""
    if not isinstance(module, types.ModuleType) or not hasattr(module, "__path__"):
        return False
    for name, value in vars(module).items():
        # Its own `__getattr__` is code, too.
        about_itself = name.startswith("__") and name.endswith("__") and not isinstance(value, types.FunctionType)
        if not about_itself and not isinstance(value, types.ModuleType):
            return False
    return True


def _tell_modules(before: Content, now: Content) -> Iterator[str]:
    lost = _lost_modules(before, now)
    yield from (f"module {name} was {'replaced' if name in now else 'removed'}" for name in lost[:_NAMED])
    if lost[_NAMED:]:
        yield f"{len(lost) - _NAMED} more modules were removed or replaced"


def _put_modules(before: Content, now: Content) -> None:
    for name in _lost_modules(before, now):
        module, (parent, _, child) = before[name], name.rpartition(".")
        sys.modules[name] = module
        if parent in sys.modules and isinstance(module, types.ModuleType):
            setattr(sys.modules[parent], child, module)  # as an import does
    importlib.invalidate_caches()


_NAME_PROBES = (
    Probe("imported module", _modules, _put_modules, _tell_modules),
    Probe("patched function", _contents, _put_contents, _tell_contents),
)

PROBES: tuple[Probe, ...] = (
    LIMITS,  # first: with a limit put back, more can be read
    *PYTHON_PROBES,
    *REGISTRY_PROBES,
    *TORCH_PROBES,
    *_NAME_PROBES,  # after settings that hold a name too: `torch.Storage` follows the default dtype
    *LEFTOVER_PROBES,
)
# Kinds that do not matter when the process ends with its call: all but those that keep the process from ending well.
ENDS_WITH_PROCESS = frozenset(probe.kind for probe in PROBES) - {
    "process group",
    "child process",
    "thread",
    "temporary file",
}
# Made once: every job reads all of them twice.
_READERS = tuple(probe.read for probe in PROBES)


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's (when imported) and torch's generators.

    Every rank gets the same seed: a model built from it starts equal on all ranks, as with one process. A test that
    wants other numbers on each rank adds the rank to a seed of its own.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Snapshot:
    """The state of this process at one moment; `restore` compares it with the current state."""

    def __init__(self, ignore: frozenset[str] = frozenset()) -> None:
        self._ignore = ignore
        self._values: list[Any] = [read() for read in _READERS]

    def restore(self) -> tuple[Dirt, ...]:
        """Restore what differs and name it.

        Returns:
            One record for each difference; `restored` is False if only a new process is free of it.
        """
        try:
            now = [read() for read in _READERS]
        except Exception:
            now = [_read(probe) for probe in PROBES]
        if now == self._values:
            return ()
        return tuple(self._examine(now))

    def accept(self, before: Snapshot, after: Snapshot) -> None:
        """Take over the changes between two other snapshots: they stay."""
        for i, (old, new) in enumerate(zip(before._values, after._values, strict=True)):
            if old != new:
                self._values[i] = new

    def _examine(self, now: list[Any]) -> list[Dirt]:
        suspects = [i for i, (old, new) in enumerate(zip(self._values, now, strict=True)) if old != new]
        suspects = [i for i in suspects if PROBES[i].kind not in self._ignore]
        if any(PROBES[i].collect_first for i in suspects):
            gc.collect()
        dirt: list[Dirt] = []
        for i in suspects:
            value = _read(PROBES[i])
            if isinstance(value, _Unreadable):
                dirt.append(Dirt(PROBES[i].kind, f"can no longer be read ({value.why})", restored=False))
            elif value != self._values[i]:
                dirt.extend(_clean(PROBES[i], self._values[i], value))
        if any(PROBES[i].kind == "process group" for i in suspects):
            torch_state.forget_dtensor_layouts()
            # A group holds its connections open, even for a while after its destruction; the group itself is reported.
            dirt = [entry for entry in dirt if not (entry.kind == "open file" and entry.what.endswith("]"))]
        return dirt


@dataclass(frozen=True, slots=True)
class _Unreadable:
    why: str


def _read(probe: Probe) -> Any:
    try:
        return probe.read()
    except Exception as error:
        return _Unreadable(type(error).__name__)


def _clean(probe: Probe, before: Any, now: Any) -> list[Dirt]:
    texts = list(probe.describe(before, now))
    if not texts:
        return []
    if probe.put_back is None:
        return [Dirt(probe.kind, text, restored=False) for text in texts]
    try:
        probe.put_back(before, now)
    except Exception as error:
        return [Dirt(probe.kind, f"{text}; restoring it failed: {error}", restored=False) for text in texts]
    # Described again after the repair: what still differs could not be restored.
    left = set(probe.describe(before, probe.read()))
    return [Dirt(probe.kind, text, restored=text not in left) for text in texts]


def take_snapshot(seed: int | None = 0, ignore: frozenset[str] = frozenset()) -> Snapshot:
    """Record the state of this process, and seed its generators unless `seed` is None; kinds in `ignore` may change."""
    if seed is not None:
        seed_generators(seed)
    return Snapshot(ignore)
