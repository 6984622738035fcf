"""Lists of samples: batches whose rows are elements of lists, because samples differ in length (texts, images with boxes).

A list of tensors may be fields of a batch, or samples. It is of samples if the tensors differ in length, or if a list of
dictionaries beside it has as many elements. What a model or a step is given directly are fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_testing.train.script_objects import attributes


def samples_in(tree: Any, around: tuple[int, ...] = ()) -> int:
    """Return how many samples the lists inside a batch hold; 0 if it has no list of samples.

    Args:
        tree: The batch.
        around: Identities of what holds it: an object may name the one that holds it.
    """
    if isinstance(tree, torch.Tensor) or id(tree) in around:
        return 0
    if around and _is_list_of_samples(tree):
        return len(tree)
    around = (*around, id(tree))
    return next((count for part in parts_of(tree) if (count := samples_in(part, around))), 0)


def is_of_samples(tree: Any, count: int) -> bool:
    """Whether a part of a batch with so many samples is a list of them, and not of as many fields."""
    if count <= 0 or not isinstance(tree, (list, tuple)) or hasattr(tree, "_fields") or len(tree) != count:
        return False
    if all(isinstance(part, torch.Tensor) for part in tree):
        # Images of three channels may be three; fields of as many rows differ in dimensions or dtype.
        return len({(part.ndim, part.dtype) for part in tree}) == 1 or any(
            len(part) != count for part in tree if part.ndim
        )
    return not any(isinstance(part, (torch.Tensor, list, tuple)) for part in tree)


def columns(tree: Any, count: int, around: tuple[int, ...] = ()) -> Iterator[Sequence[Any] | torch.Tensor]:
    """Yield what has one element for each of so many samples: lists, and tensors of as many rows."""
    if isinstance(tree, torch.Tensor):
        if tree.ndim and len(tree) == count:
            yield tree
    elif around and is_of_samples(tree, count):
        yield tree
    elif id(tree) not in around:
        for part in parts_of(tree):
            yield from columns(part, count, (*around, id(tree)))


def parts_of(tree: Any) -> list[Any]:
    """Return what a container or an object of a script's class holds; nothing of anything else."""
    if isinstance(tree, Mapping):
        return [*tree.values()]
    if isinstance(tree, (list, tuple)):
        return [*tree]
    return [*(attributes(tree) or {}).values()]


def _is_list_of_samples(tree: Any) -> bool:
    if not isinstance(tree, (list, tuple)) or not tree or hasattr(tree, "_fields"):
        return False
    if all(isinstance(part, Mapping) and any(isinstance(t, torch.Tensor) for t in part.values()) for part in tree):
        return True
    tensors = isinstance(tree, list) and all(isinstance(part, torch.Tensor) and part.ndim for part in tree)
    return tensors and len({len(part) for part in tree}) > 1


_FIELDS = 2
"""Tensors in a list that may be the fields of a batch, of which ranks have different numbers of rows."""


def are_samples_apart(parts: Sequence[Any]) -> bool:
    """Whether the ranks' lists are of samples of one length on each rank, and of another on another rank."""
    lengths = set()
    for part in parts:
        if (
            not isinstance(part, list)
            or len(part) <= _FIELDS
            or not all(isinstance(t, torch.Tensor) and t.ndim for t in part)
        ):
            return False
        if len({(t.shape, t.dtype) for t in part}) > 1:
            return False
        lengths.add(len(part[0]))
    return len(lengths) > 1
