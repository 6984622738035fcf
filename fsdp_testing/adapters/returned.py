"""Says which method of an adapter returned something else than it promises, before a check stumbles over it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from fsdp_testing.adapters.protocol import Division, Piece
from fsdp_testing.base.documentation import page
from fsdp_testing.errors import InvalidImplementation


def _context(value: Any) -> Iterator[str]:
    if not isinstance(value, AbstractContextManager):
        yield f"a context manager, got {_text(value)}"


def _mapping(value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"a mapping, got {_text(value)}"


def _norm(value: Any) -> Iterator[str]:
    if not isinstance(value, torch.Tensor):
        yield f"the norm before clipping as a tensor, got {_text(value)}"


def _division(value: Any) -> Iterator[str]:
    if value is not None and not isinstance(value, Division):
        yield f"a Division or None, got {_text(value)}"


def _pieces(value: Any) -> Iterator[str]:
    yield from _mapping(value)
    for fqn, pieces in value.items() if isinstance(value, Mapping) else ():
        if not _are_pieces(pieces):
            yield f"a tuple of Piece for {fqn!r}, got {_text(pieces)}"


def _entries(value: Any) -> Iterator[str]:
    yield from _mapping(value)
    for fqn, entries in value.items() if isinstance(value, Mapping) else ():
        yield from (f"{what} for {fqn!r}" for what in _mapping(entries))
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            if not (entry is None or isinstance(entry, (int, float)) or _are_pieces(entry)):
                yield f"a number or a tuple of Piece for {name!r} of {fqn!r}, got {_text(entry)}"


def _state(value: Any) -> Iterator[str]:
    yield from _mapping(value)
    for fqn, tensor in value.items() if isinstance(value, Mapping) else ():
        if hasattr(tensor, "__array__") and not isinstance(tensor, torch.Tensor):
            yield f"a tensor for {fqn!r}, got {_text(tensor)}"


def _optimizer_state(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and not value:
        return  # of a rank beside the one that saves
    state = value.get("state") if isinstance(value, Mapping) else None
    if not isinstance(state, Mapping):
        yield f"a mapping with the mapping `state`, got {_text(value)}"
    elif positions := [key for key in state if not isinstance(key, str)]:
        yield f"names of parameters as keys of `state`, got {_text(positions[0])}"


def _optimizer(value: Any) -> Iterator[str]:
    if not hasattr(value, "param_groups"):
        yield f"an optimizer with `param_groups`, got {_text(value)}"


def _waiting(value: Any) -> Iterator[str]:
    if value is not None and not callable(value):
        yield f"a function that waits, or None, got {_text(value)}"


PROMISES: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "no_sync": _context,
    "clip_grad_norm": _norm,
    "full_parameters": _context,
    "local_pieces": _pieces,
    "optimizer_pieces": _entries,
    "division": _division,
    "full_state_dict": _state,
    "sharded_state_dict": _mapping,
    "local_state_dict": _mapping,
    "full_optimizer_state": _optimizer_state,
    "sharded_optimizer_state": _mapping,
    "unshard_async": _waiting,
    "trace_units": _context,
    "gathered_bytes": _mapping,
    "build_optimizer": _optimizer,
}
"""By method, what yields the ways in which a value is not what the method promises: "EXPECTED, got VALUE"."""


def checked(adapter: str, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of that name; what it returns is checked, if something is promised.

    The returned function raises `InvalidImplementation`, which lists every way in which a value is not what is promised.
    """
    promise = PROMISES.get(method)
    if promise is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if problems := list(promise(value)):
            raise InvalidImplementation(
                f"implementation {adapter!r}: `{method}` returned something else than it promises: expected "
                f"{'; '.join(problems)}. Correct the adapter ({page('docs/adapters.md')})."
            )
        return value

    return call


def _are_pieces(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(piece, Piece) for piece in value)


def _text(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else f'{text[:57]}...'}"
