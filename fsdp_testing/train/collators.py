"""Records what a `DataLoader`'s `collate_fn` makes of rows, and repeats it with the rows of all ranks.

Its result for the rows of all ranks together may differ from its results for each rank's rows: it may use a statistic of its
batch, or a state that it keeps from batch to batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

from fsdp_testing.oracle.models import map_tensors
from fsdp_testing.train.batches import row_digests, tensors_in
from fsdp_testing.train.comparison import floor
from fsdp_testing.train.generators import generators_of

_ROUNDINGS = 64
"""Roundings that a row may have, beside others, which another number of rows in a batch makes."""


@dataclass(frozen=True, slots=True)
class Collated:
    """An item and the rows that it was made from."""

    samples: list[Any]
    item: Any


class Keeping:
    """Replaces a `collate_fn`, and keeps its input; works in the workers of a loader too."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return Collated(copied(samples), self.collate(samples))


def copied(samples: Iterable[Any]) -> list[Any]:
    """Return copies of rows, from which a collator may remove parts."""
    return [type(sample)(sample) if type(sample) in (dict, list) else sample for sample in samples]


@dataclass(frozen=True, slots=True)
class Uncollated:
    """Rows that a fed process collates by its own `collate_fn`.

    Attributes:
        samples: Samples of all ranks.
        counts: Number of samples of each rank, which takes as many of the joint item.
        item: The items that the ranks' collators made of them, joined; None if they cannot be joined.
    """

    samples: list[Any]
    counts: tuple[int, ...]
    item: Any = None

    def share(self, item: Any, rank: int) -> Any:
        """Return the rows of one rank of an item that is made of all ranks' rows; -1: of all."""
        rows, count = slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1])), sum(self.counts)
        return item if rank < 0 else map_tensors(lambda t: t[rows] if t.ndim and len(t) == count else t, item)


def with_numbers(item: Any, made: Any) -> Any:
    """Return an item with what is no row (a count, a text) as a collator made it; of items that are not alike the item."""
    if isinstance(item, torch.Tensor) and isinstance(made, torch.Tensor):
        return item if item.ndim else made
    if type(item) is not type(made) or isinstance(item, torch.Tensor):
        return item
    if isinstance(item, dict):
        return {key: with_numbers(part, made.get(key, part)) for key, part in item.items()}
    if isinstance(item, (list, tuple)) and tensors_in(item) and len(item) == len(made):
        parts = [*map(with_numbers, item, made)]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return made


def has_numbers(item: Any) -> bool:
    """Whether an item has numbers beside its rows, as their count."""
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    number = isinstance(item, (int, float)) or (isinstance(item, torch.Tensor) and not item.ndim)
    return number or any(map(has_numbers, parts))


def is_own(collate: Any) -> bool:
    """Whether a collator is not one of torch's, which only stack rows."""
    return collate is not default_collate and collate is not default_convert


def is_alike(made: Any, item: Any) -> bool:
    """Whether both have the same rows but for roundings, or the very same in another order."""
    pairs = [*zip(one := tensors_in(made), two := tensors_in(item))]
    if [(t.shape, t.dtype) for t in one] != [(t.shape, t.dtype) for t in two]:
        return False
    count = next((len(t) for t in one if t.ndim), 0)
    apart = [pair for pair in pairs if not _is_near(*pair)]
    rows = all(t.ndim and len(t) == count for t, _ in apart)
    return not apart or (rows and Counter(row_digests(one)) == Counter(row_digests(two)))


def _is_near(one: torch.Tensor, two: torch.Tensor) -> bool:
    bound = floor(one.dtype, _ROUNDINGS) * float(two.abs().max()) if one.is_floating_point() and one.numel() else 0.0
    return torch.allclose(one.double(), two.double(), rtol=0.0, atol=bound, equal_nan=True)


def draws(collate: Callable[[Any], Any], samples: Sequence[Any]) -> bool:
    """Whether a collator draws random numbers for these rows, by a default generator or by one that it holds or makes."""
    with generators_of([collate]).watch() as noted:
        collate(copied(samples))
    return bool(noted)
