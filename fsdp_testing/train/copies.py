"""Which copies of its weights does a script keep, as for a moving average, and what is in them?

Looked for by name in the variables of the functions that run when the script is ended, and one level below in objects of
its own classes: modules, mappings from names to tensors, and lists with a tensor for each parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.shared import naming, pieces
from fsdp_testing.train.held import Spans, held_by, spans_of

_FOREIGN = frozenset({"torch", "numpy", "fsdp_testing", "builtins", *sys.stdlib_module_names} - {"__main__"})

Shapes = dict[str, tuple[int, ...]]


def copies_in(variables: Sequence[Mapping[str, Any]], models: Sequence[nn.Module], block: int) -> dict[str, Spans]:
    """Return what this rank has of each other copy of the models' weights, by the name of its variable.

    Args:
        variables: Of each function, or of the script.
        models: Those that are trained.
        block: Elements to each sum that is kept of their larger tensors.
    """
    found: dict[str, Spans] = {}
    trained = {id(part) for model in models for part in model.modules()}
    with suppress(Exception):  # whatever a variable is, the training was only watched
        shapes = {name: tuple(held[0].shape) for model in models for name, held in held_by(model).items() if held}
        for name, value in _named(variables):
            if isinstance(value, nn.Module) and not trained.isdisjoint(map(id, value.modules())):
                continue
            with suppress(Exception):
                spans = _spans(value, shapes, block)
                if spans:
                    found[name] = spans
    return found


def _named(variables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for scope in variables:
        for name, value in list(scope.items()):
            if name.startswith("__"):
                continue
            yield name, value
            package = type(value).__module__.partition(".")[0]
            if package not in _FOREIGN and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
                yield from ((f"{name}.{attribute}", part) for attribute, part in vars(value).items())


def _spans(value: Any, shapes: Shapes, block: int) -> Spans:
    if isinstance(value, nn.Module):
        own = {name.removeprefix("module."): held for name, held in held_by(value).items()}
    elif isinstance(value, Mapping):
        own = {
            naming.original(name).removeprefix("module."): pieces.of_tensor(tensor)
            for name, tensor in value.items()
            if isinstance(name, str) and isinstance(tensor, torch.Tensor)
        }
    elif isinstance(value, list) and len(value) == len(shapes) and all(type(part) is torch.Tensor for part in value):
        own = {name: pieces.of_tensor(tensor) for name, tensor in zip(shapes, value)}
    else:
        return {}
    found = {name: held for name, held in own.items() if held and shapes.get(name) == held[0].shape}
    return {name: spans_of(held, "value", block) for name, held in found.items()}
