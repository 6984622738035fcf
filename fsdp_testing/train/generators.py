"""The random generators of a process: the default ones of torch, Python and numpy, and those that a script holds itself."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from fsdp_testing.base import compat

_DEPTH, _MOST_PARTS = 4, 64
_MAKERS = {"default_rng", "RandomState", "Random", "seed"}


@compat.no_transforms()
def states(held: Sequence[Any] = ()) -> dict[str, str]:
    """Return a digest of the state of each default generator, by the package it belongs to, and of those that are held."""
    numpy = sys.modules.get("numpy")
    known = {"torch": torch.get_rng_state().numpy().tobytes(), "random": repr(random.getstate()).encode()}
    if numpy is not None:
        known["numpy"] = _plain(numpy.random.get_state())
    known |= {f"held {number}": _state(generator) for number, generator in enumerate(held)}
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in known.items()}


@dataclass(frozen=True, slots=True)
class Generators:
    """The random generators of functions or objects, and of what these hold in turn.

    Attributes:
        held: Those that they hold.
        makers: Names of functions among them that use what makes or seeds a generator.
    """

    held: tuple[Any, ...]
    makers: tuple[dict[str, Any], ...]

    @contextmanager
    def watch(self) -> Iterator[list[bool]]:
        """Note what draws in the block: a list that fills once a generator moves or is made; torch's are seen elsewhere."""
        before, noted = states(self.held), list[bool]()
        numpy = sys.modules.get("numpy.random")
        packages = [vars(package) for package in (random, numpy) if package is not None] if self.makers else []
        spaces = {id(space): space for space in (*packages, *self.makers)}.values()
        originals = [(space, name, space[name]) for space in spaces for name in _MAKERS & space.keys()]
        try:
            # Name by name: other changes of the block to a namespace stay.
            for space, name, original in originals:
                space[name] = _Maker(original, noted)
            yield noted
        finally:
            for space, name, original in originals:
                space[name] = original
        noted += [True] * (states(self.held) != before)


class _Maker:
    """Wraps a function that makes or seeds a generator, and notes its calls."""

    def __init__(self, original: Any, noted: list[bool]) -> None:
        self._original, self._noted = original, noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._noted.append(True)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._original)


def generators_of(owners: Iterable[Any]) -> Generators:
    """Return the generators of functions or objects."""
    held, makers, waiting = [], [], [(owner, 0) for owner in owners]
    known = {id(owner) for owner, _ in waiting}
    while waiting:
        owner, depth = waiting.pop()
        if isinstance(owner, FunctionType) and not _MAKERS.isdisjoint(owner.__code__.co_names):
            makers.append(owner.__globals__)
        if isinstance(owner, _kinds()):
            held.append(owner)
        elif depth < _DEPTH:
            new = {id(part): part for part in _parts(owner) if id(part) not in known}
            known.update(new)
            waiting += [(part, depth + 1) for part in new.values()]
    return Generators(tuple(held), tuple(makers))


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return torch.Generator, random.Random, *own


def _parts(owner: Any) -> Iterator[Any]:
    """Yield attributes of an object; of a function its arguments, and the closed-over and global names that it uses."""
    if isinstance(owner, (torch.Tensor, ModuleType, type, str)):
        return
    if isinstance(owner, MethodType):
        yield from (owner.__self__, owner.__func__)
    elif isinstance(owner, functools.partial):
        yield from (owner.func, owner.args, owner.keywords)
    elif isinstance(owner, FunctionType):
        names = owner.__globals__
        yield from (names[name] for name in owner.__code__.co_names if name in names)
        for cell in owner.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents
    elif isinstance(owner, (dict, list, tuple)):
        parts = owner.values() if isinstance(owner, dict) else owner
        yield from parts if len(owner) <= _MOST_PARTS else ()
    else:
        yield from getattr(owner, "__dict__", {}).values()
        runs = [*_methods(owner, ("__call__", "forward"))]
        yield from runs
        yield from (method for run in runs for method in _methods(owner, run.__code__.co_names))


def _methods(owner: Any, names: Iterable[str]) -> Iterator[FunctionType]:
    """Yield methods by their names, but for those of torch's modules."""
    for name in names:
        method = getattr(type(owner), name, None)
        if isinstance(method, FunctionType) and not method.__module__.startswith("torch."):
            yield method


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    return (
        _plain(generator.get_state())
        if hasattr(generator, "get_state")
        else repr(generator.bit_generator.state).encode()
    )


def _plain(state: Iterable[Any]) -> bytes:
    return repr([part.tobytes() if hasattr(part, "tobytes") else part for part in state]).encode()
