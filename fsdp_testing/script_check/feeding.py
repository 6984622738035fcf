"""What data did the ranks of a world take, and how is one process given the same, in place of its own?

Three places where data enters are known: a line that the user marked with `batch`, the items of `DataLoader`s, and the
arguments of the outermost forward where these determine the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.training_check.batches import Call, on_cpu, row_digests


class Source(StrEnum):
    """Where the data of a training is taken from."""

    MARK = "the line marked with fsdp_testing.batch"
    LOADER = "the items of its DataLoader"
    FORWARD = "the arguments of forward"


@dataclass(slots=True)
class LoaderSeen:
    """One `DataLoader`, in the order of first use.

    Attributes:
        length: What `len` gave; None where it was not asked or has none.
        passes: The items of each pass.
        rows: Digests of the rows of each pass.
        complete: Of each pass whether all that the loader has was taken.
        batch: Rows of the first item.
        due: Items of a pass; None where the loader has no length.
        shuffles: Whether a sampler is to take another order in each pass.
        replaces: Whether its sampler draws rows that it has drawn already.
    """

    length: int | None = None
    passes: list[list[Any]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    batch: int = 0
    due: int | None = None
    shuffles: bool = False
    replaces: bool = False

    @property
    def repeats_order(self) -> bool:
        """Whether a second pass began as the first did, though a sampler is to shuffle."""
        if not self.shuffles or len(self.rows) < 2:
            return False
        first, second = self.rows[0], self.rows[1]
        known = min(len(first), len(second))
        return len(set(first[:known])) > 1 and first[:known] == second[:known]

    def take(self, turn: int, item: Any) -> None:
        """Take note of an item of a pass."""
        digests = row_digests(item)
        self.passes[turn].append(on_cpu(item))
        self.rows[turn] += digests
        self.batch = self.batch or len(digests)
        self.complete[turn] = len(self.passes[turn]) == self.due


@dataclass(slots=True)
class Taken:
    """All data that one rank took."""

    loaders: list[LoaderSeen] = field(default_factory=list)
    marked: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Feed:
    """What one process is given; `source` is None where it keeps its own data."""

    source: Source | None = None
    loaders: list[LoaderSeen] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)


class Feeder:
    """Records what a rank takes, and replaces it where there is a feed."""

    def __init__(self, feed: Feed) -> None:
        self.taken = Taken()
        self._feed = feed
        self._waiting = iter(feed.batches)
        self._loaders: list[Any] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See the `DataLoader`s and marked lines of this process."""
        global _current
        real_iter, real_len = DataLoader.__iter__, DataLoader.__len__
        before, _current = _current, self
        try:
            with (
                mock.patch.object(DataLoader, "__iter__", lambda loader: self._items(loader, real_iter(loader))),
                mock.patch.object(DataLoader, "__len__", lambda loader: self._length(loader, real_len(loader))),
            ):
                yield
        finally:
            _current = before

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with which the outermost forward is to be called."""
        call = next(self._waiting, None) if self._feed.source is Source.FORWARD else None
        return (args, kwargs) if call is None else call

    def mark(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a marked line is to give."""
        self.taken.marked.append(on_cpu(values))
        given = next(self._waiting, None) if self._feed.source is Source.MARK else None
        return values if given is None else tuple(given)

    def _seen(self, loader: Any) -> tuple[int, LoaderSeen]:
        for number, known in enumerate(self._loaders):
            if known is loader:
                return number, self.taken.loaders[number]
        self._loaders.append(loader)
        self.taken.loaders.append(LoaderSeen())
        return len(self._loaders) - 1, self.taken.loaders[-1]

    def _fed(self, number: int) -> LoaderSeen | None:
        feeds = self._feed.source is Source.LOADER and number < len(self._feed.loaders)
        return self._feed.loaders[number] if feeds else None

    def _length(self, loader: Any, length: int) -> int:
        number, seen = self._seen(loader)
        seen.length = length
        fed = self._fed(number)
        return length if fed is None or fed.length is None else fed.length

    def _items(self, loader: Any, own: Iterator[Any]) -> Iterator[Any]:
        number, seen = self._seen(loader)
        seen.passes.append([])
        seen.rows.append([])
        seen.complete.append(False)
        sampler = getattr(loader, "sampler", None)
        seen.shuffles = isinstance(sampler, DistributedSampler) and sampler.shuffle
        seen.replaces = bool(getattr(sampler, "replacement", False))
        fed, turn = self._fed(number), len(seen.passes) - 1
        if fed is None:
            seen.due = _length(loader)
            for item in own:
                seen.take(turn, item)
                yield item
            seen.complete[turn] = True
            return
        for item in fed.passes[turn] if turn < len(fed.passes) else ():
            next(own, None)  # so that its own sampler draws what it draws
            seen.passes[turn].append(item)
            yield item


def _length(loader: Any) -> int | None:
    try:
        return len(loader.batch_sampler if loader.batch_sampler is not None else loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


_current: Feeder | None = None


def batch(*values: Any) -> Any:
    """Mark the line where a training takes its batch: `x, y = fsdp_testing.batch(x, y)`.

    Returns what it is given. While `fsdp-verify train` runs the script in one process, it returns the rows of all ranks instead.
    """
    found = values if _current is None else _current.mark(values)
    return found[0] if len(values) == 1 else found


def joined(parts: Sequence[Any]) -> Any:
    """Return the batches of all ranks as one: tensors with rows are concatenated, all else is rank 0's.

    Raises:
        InvalidArgument: Tensors of the ranks have rows of different shapes.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if not first.ndim:
            return first
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise InvalidArgument(
                f"data: expected rows of one shape on all ranks, got batches {shapes}. Pad rows to one length, since one "
                "process is to be given all of them at once."
            ) from error
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        together = [joined(column) for column in zip(*parts)]
        return type(first)(*together) if hasattr(first, "_fields") else type(first)(together)
    return first


def feed_of(ranks: Sequence[Taken], forwards_alone: int, forwards_here: int) -> Feed:
    """Return what one process is given in place of its own data; `source` is None where nothing determines the loss.

    Args:
        ranks: What each rank took.
        forwards_alone: Forwards of one process until its first step.
        forwards_here: Forwards of each rank until its first step. Where one process makes as many as all ranks together, it is
            given their batches one by one, otherwise those of one moment as one.
    """
    one_by_one = len(ranks) > 1 and forwards_alone == len(ranks) * forwards_here

    def together(columns: Sequence[Sequence[Any]]) -> list[Any]:
        rows = list(zip(*columns))
        return [part for row in rows for part in row] if one_by_one else [joined(row) for row in rows]

    if ranks[0].marked:
        return Feed(Source.MARK, batches=together([rank.marked for rank in ranks]))
    if any(loader.passes for loader in ranks[0].loaders):
        return Feed(Source.LOADER, [_loader(ranks, number, together) for number in range(len(ranks[0].loaders))])
    if ranks[0].calls and all(call.determines_loss for call in ranks[0].calls):
        return Feed(
            Source.FORWARD, batches=together([[(call.args, call.kwargs) for call in rank.calls] for rank in ranks])
        )
    return Feed()


def _loader(ranks: Sequence[Taken], number: int, together: Any) -> LoaderSeen:
    """Return a loader of all ranks; of passes that not every rank makes, those of rank 0."""
    seen = [rank.loaders[number] for rank in ranks if number < len(rank.loaders)]
    passes = []
    for turn, own in enumerate(seen[0].passes):
        others = [loader.passes[turn] for loader in seen if turn < len(loader.passes)]
        passes.append(together(others) if len(others) == len(ranks) else own)
    length = seen[0].length
    return LoaderSeen(length, passes)
