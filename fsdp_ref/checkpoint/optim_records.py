"""The records of optimizer state that ranks exchange before combining it, and their differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.checkpoint.optim_index import Original, same_values


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A rank's record of one entry.

    Attributes:
        dtype: of a tensor that is shaped like this rank's piece of the parameter; None for anything else.
        value: anything else, tensors on the CPU. Of a piece of one element too: a step count may look the same, and is
            distinguished by larger pieces.
    """

    dtype: torch.dtype | None
    value: Any = None

    def differs(self, other: Entry) -> bool:
        """Return whether two ranks' values differ. Objects that cannot be compared count as equal."""
        if self.dtype is not None or other.dtype is not None:
            return self.dtype != other.dtype
        return not same_values(self.value, other.value, copies=True)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A rank's state of one original: the number of its parameter group, and its entries; None for no state."""

    group: int | None
    entries: dict[str, Entry] | None


def entry_of(original: Original, value: Any) -> Entry:
    """Return this rank's record of one entry of an original in a unit."""
    if not isinstance(value, Tensor):
        return Entry(None, value)
    assert original.handle is not None  # records are made of what units hold
    if value.shape == original.handle.originals.shard_views()[original.index].shape:
        return Entry(value.dtype, value.detach().cpu() if value.numel() == 1 else None)
    return Entry(None, value.detach().cpu())


def _as_values(entries: dict[str, Entry] | None, plain: set[str]) -> dict[str, Entry] | None:
    """Treat a single element that looked like a piece as a value if it is a value on another rank."""
    if entries is None or not plain:
        return entries
    return {
        name: Entry(None, entry.value) if name in plain and entry.value is not None else entry
        for name, entry in entries.items()
    }


def _differences(one: tuple[int, Mapping[str, Entry]], other: tuple[int, Mapping[str, Entry]]) -> Iterator[str]:
    for name in dict.fromkeys((*one[1], *other[1])):
        mine, others = one[1].get(name), other[1].get(name)
        if mine is None or others is None or mine.differs(others):
            has = [f"rank {rank}: {_shown(entries.get(name))}" for rank, entries in (one, other)]
            yield f".{name}: {', '.join(has)}"


def _shown(entry: Entry | None) -> str:
    text = "missing" if entry is None else f"{entry.dtype or entry.value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _has_elements(entry: Entry) -> bool:
    values = entry.value if isinstance(entry.value, list | tuple) else (entry.value,)
    return entry.dtype is None and any(isinstance(value, Tensor) and value.numel() > 1 for value in values)


def plain_names(records: Iterable[Record]) -> set[str]:
    """Return the names of entries that are no pieces, because on some rank their shape is not a piece's."""
    return {name for record in records for name, entry in (record.entries or {}).items() if entry.dtype is None}


def merged(records: Sequence[Record], holders: Iterable[int], plain: set[str]) -> tuple[Record, list[str]]:
    """Return the ranks' combined record of one original, and how some ranks differ from the first.

    Args:
        records: by rank.
        holders: the ranks that hold elements of it.
        plain: what :func:`plain_names` gave for all originals.
    """
    (first, mine), *others = [(rank, _as_values(records[rank].entries, plain)) for rank in holders]
    problems: list[str] = []
    for rank, entries in others:
        if entries is not None and mine is not None:
            problems += _differences((first, mine), (rank, entries))
        elif entries is not mine:
            has, lacks = (rank, first) if mine is None else (first, rank)
            problems.append(f": state on rank {has}, none on rank {lacks}")
    for rank in set(range(len(records))) - {first, *(rank for rank, _ in others)}:
        # An optimizer that joins its tensors, as LBFGS does, keeps the state of all with the first, held here or not.
        beyond = {name: each for name, each in (records[rank].entries or {}).items() if _has_elements(each)}
        problems += _differences(
            (first, {name: mine[name] for name in beyond if mine and name in mine}), (rank, beyond)
        )
    return Record(records[first].group, mine), problems
