"""Records the data that the ranks of a world took, and gives it to one process instead of its own.

Three places where data enters are known: a line that the user marked with `batch`, the items of `DataLoader`s, and the
arguments of the outermost forward if these determine the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, chain, pairwise, repeat
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.batches import Call, joined, on_cpu, row_digests, tensors_in
from fsdp_testing.train.collators import Uncollated, copied, has_numbers, is_alike, with_numbers
from fsdp_testing.train.conventions import AsRanks
from fsdp_testing.train.loaders import LoaderSeen, LoaderWatch, Pass, of_training
from fsdp_testing.train.script_objects import unpacked

_Groups = Callable[[Sequence[Sequence[Any]]], list[tuple[Any, ...]]]


class Source(StrEnum):
    """The source of a training's data."""

    MARK = "the line marked with fsdp_testing.batch"
    LOADER = "the items of its DataLoader"
    FORWARD = "the arguments of forward"


@dataclass(slots=True)
class Taken:
    """All data that one rank took.

    Attributes:
        loaders: Its `DataLoader`s.
        marked: Arguments of marked lines.
        marks: Digests of their rows, for each call.
        apart: Number of items for which a fed process's collator makes other rows than the ranks' collators.
        calls: The outermost forwards.
        items: How many items of `DataLoader`s had been taken when each step began.
        counts: The same, of each loader.
    """

    loaders: list[LoaderSeen] = field(default_factory=list)
    marked: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    counts: list[tuple[int, ...]] = field(default_factory=list)
    marks: list[tuple[str, ...]] = field(default_factory=list)
    apart: int = 0

    @property
    def rows(self) -> list[str]:
        """Digests of all rows as the script takes them: at marked lines, or else from `DataLoader`s."""
        if self.marks:
            return [row for rows in self.marks for row in rows]
        return [row for loader in self.loaders for loader_pass in loader.passes for row in loader_pass.rows]

    def indices(self, steps: int) -> list[tuple[str, ...]]:
        """Return the rows of the dataset that the items of each step were made of, loader by loader; nothing of streams."""
        taken: list[tuple[str, ...]] = [()] * steps
        trains = of_training(self.loaders)
        for number, loader in enumerate(self.loaders):
            if not trains[number] or len(self.counts) < steps:
                continue
            items: list[tuple[str, ...]] = []
            for one in loader.passes:
                ends = [*accumulate(one.sizes, initial=0)]
                items += [tuple(one.indices[start:stop]) for start, stop in pairwise(ends)]
            ends = [0, *(counts[number] if number < len(counts) else 0 for counts in self.counts[:steps])]
            for step, (start, stop) in enumerate(pairwise(ends)):
                taken[step] += tuple(chain(*items[start:stop]))
        return taken if all(taken) else []


@dataclass(slots=True)
class FedLoader:
    """The `len` of a loader, and the items of each pass; None keeps its own."""

    length: int | None = None
    passes: list[list[Any]] | None = None


@dataclass(slots=True)
class Feed:
    """The data for one process; `source` is None if it keeps its own.

    Attributes:
        source: The place where the data enters.
        loaders: Records of each loader.
        batches: For marked lines, or forwards.
        ranks: The ranks whose conventions it must follow, if any are accepted.
        weights: Initial parameters of its models, by name; if empty, its own.
        pads: Whether batches have other shapes than the ranks' own: rows are padded to another length.
        collates: Whether the rows come from a collator whose result for all ranks' rows differs from its results for each.
        loose: Whether numbers beside the rows, as their count, are those of rank 0.
        blind: Whether forward's rows are not along the first dimension, so that their digests tell nothing.
        rank: The rank whose rows are taken from items made of all ranks' rows; -1 takes all.
        scale: Factor of each loss that is handed to backward.
    """

    source: Source | None = None
    loaders: list[FedLoader] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    pads: bool = False
    collates: bool = False
    loose: bool = False
    blind: bool = False
    ranks: AsRanks | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rank: int = -1
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether a process keeps everything of its own."""
        return self.source is None and self.ranks is None and not self.weights and self.scale == 1.0

    def __str__(self) -> str:
        return f"{self.source}{', padded together by its collate_fn' if self.pads else ''}"


class Feeder:
    """Records what a rank takes, and replaces it where there is a feed.

    Args:
        feed: The data it gets.
        keeps: Whether the data is kept.
    """

    def __init__(self, feed: Feed, keeps: bool) -> None:
        self.taken = Taken()
        self._feed, self._keeps = feed, keeps
        self._waiting = iter(feed.batches)
        self._loaders: list[LoaderWatch] = []
        self._out: list[Pass] = []  # passes with an item that no forward has followed yet
        self._items_taken = self._epoch_calls = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See the `DataLoader`s, their `set_epoch` and marked lines of this process."""
        global _current
        real_iter, real_len, set_epoch = DataLoader.__iter__, DataLoader.__len__, DistributedSampler.set_epoch
        before, _current = _current, self

        def set_counted_epoch(sampler: Any, epoch: int) -> None:
            self._epoch_calls += 1
            set_epoch(sampler, epoch)

        try:
            with (
                mock.patch.object(DataLoader, "__iter__", lambda loader: self._pass(loader, real_iter)),
                mock.patch.object(DataLoader, "__len__", lambda loader: self._length(loader, real_len(loader))),
                mock.patch.object(DistributedSampler, "set_epoch", set_counted_epoch),
            ):
                yield
        finally:
            _current = before

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments for the outermost forward."""
        for loader_pass in self._out:
            loader_pass.trained += 1
        self._out.clear()
        call = next(self._waiting, None) if self._feed.source is Source.FORWARD else None
        return (args, kwargs) if call is None else unpacked(call, (args, kwargs))

    def mark(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result for a marked line."""
        self.taken.marked.append(on_cpu(values))
        self.taken.marks.append(row_digests(values))
        given = next(self._waiting, None) if self._feed.source is Source.MARK else None
        return values if given is None else unpacked(tuple(given), values)

    def end_step(self) -> None:
        """Note how much has been taken until a step begins."""
        self.taken.items.append(self._items_taken)
        self.taken.counts.append(tuple(sum(len(one.sizes) for one in seen.passes) for seen in self.taken.loaders))

    def finish(self) -> None:
        for loader in self._loaders:
            loader.finish()

    def _watched(self, loader: Any) -> tuple[int, LoaderWatch]:
        for number, known in enumerate(self._loaders):
            if known.loader is loader:
                return number, known
        self._loaders.append(LoaderWatch(loader, self._keeps))
        self.taken.loaders.append(self._loaders[-1].seen)
        return len(self._loaders) - 1, self._loaders[-1]

    def _fed(self, number: int) -> FedLoader | None:
        feeds = self._feed.source is Source.LOADER and number < len(self._feed.loaders)
        return self._feed.loaders[number] if feeds else None

    def _length(self, loader: Any, length: int) -> int:
        number, watched = self._watched(loader)
        watched.seen.length = length
        fed = self._fed(number)
        return length if fed is None or fed.length is None else fed.length

    def _pass(self, loader: Any, real_iter: Any) -> Iterator[Any]:
        number, watched = self._watched(loader)
        fed, turn = self._fed(number), len(watched.seen.passes)
        passes = fed.passes if fed is not None else None
        items = passes[turn] if passes and turn < len(passes) else []
        # Its collator may keep a state of what it was given: that is what the items in their place are made of.
        collates = not any(isinstance(item, Uncollated) for item in items)
        loader_pass, own = watched.begin(lambda: real_iter(loader), self._epoch_calls, collates=collates)
        return self._counted(loader_pass, own if passes is None else self._given(loader, items, own))

    def _given(self, loader: Any, items: Sequence[Any], own: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            made = next(own, None)  # so that its own sampler draws what it draws
            yield self._collated(loader.collate_fn, item) if isinstance(item, Uncollated) else unpacked(item, made)

    def _collated(self, collate: Any, rows: Uncollated) -> Any:
        made = collate(copied(unpacked(rows.samples)))
        if rows.item is not None:
            item = with_numbers(unpacked(rows.item, made), made)
            alike = is_alike(made, item)
            self.taken.apart += not alike
            made = item if alike or not self._feed.collates else made
        return rows.share(made, self._feed.rank)

    def _counted(self, loader_pass: Pass, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._items_taken += 1
            self._out.append(loader_pass)
            try:
                yield item
            finally:
                if loader_pass in self._out:
                    self._out.remove(loader_pass)


_current: Feeder | None = None


def batch(*values: Any) -> Any:
    """Mark the line where a training takes its batch: `x, y = fsdp_testing.batch(x, y)`.

    Returns its arguments. While `fsdp-verify train` runs the script in one process, it returns the rows of all ranks instead.
    """
    rows = values if _current is None else _current.mark(values)
    return rows[0] if len(values) == 1 else rows


def _fits(parts: Sequence[Any], *, alike: bool) -> bool:
    """Whether tensors of the ranks' batches have rows of one shape, and with `alike` all else is the same on all ranks."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return all(isinstance(part, torch.Tensor) and part.shape[1:] == first.shape[1:] for part in parts)
    if isinstance(first, dict):
        same = all(isinstance(part, dict) and part.keys() == first.keys() for part in parts)
        return same and all(_fits([part[key] for part in parts], alike=alike) for key in first)
    if isinstance(first, (list, tuple)):
        same = all(isinstance(part, (list, tuple)) and len(part) == len(first) for part in parts)
        return (same or not alike) and all(_fits(column, alike=alike) for column in zip(*parts))
    return not alike or all(repr(part) == repr(first) for part in parts)


def feeds_of(ranks: Sequence[Taken], forwards_alone: int, forwards_here: int) -> Iterator[Feed]:
    """Yield what one process may be given in place of its own data, in the order of trying; nothing where that is unknown.

    Args:
        ranks: The rows of each rank.
        forwards_alone: Forwards of one process until its first step.
        forwards_here: Forwards of each rank until its first step. Where one process makes as many as all ranks together, it is
            given their batches one by one, otherwise those of one moment as one.
    """
    one_by_one = len(ranks) > 1 and forwards_alone == len(ranks) * forwards_here

    def groups(columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Return what is one batch of all ranks, in the order in which it is given."""
        moments = list(zip(*columns))
        return [(part,) for moment in moments for part in moment] if one_by_one else moments

    blind = not _rows_first(ranks[0])
    if ranks[0].marked:
        if not one_by_one and not _is_long(ranks[0].marked[0], _sizes(ranks[0])):
            raise InvalidArgument(
                f"data: the marked line has its rows along another dimension than the first. {_ROWS_FIRST}"
            )
        yield Feed(Source.MARK, batches=_together(groups([rank.marked for rank in ranks])), blind=blind)
        return
    if any(loader.passes for loader in ranks[0].loaders):
        yield from (replace(feed, blind=blind) for feed in _loader_feeds(ranks, groups, one_by_one))
    if ranks[0].calls and (one_by_one or not blind) and all(call.determines_loss for call in ranks[0].calls):
        calls = [[(call.args, call.kwargs) for call in rank.calls] for rank in ranks]
        if one_by_one or all(_fits(moment, alike=False) for moment in zip(*calls)):
            yield Feed(Source.FORWARD, batches=_together(groups(calls), depth=-1))


_ROWS_FIRST = (
    "Give the batch with the rows first, and mark the line, `x, y = fsdp_testing.batch(x, y)`; transpose after it, because one "
    "process gets the rows of all ranks at once."
)


def _sizes(rank: Taken) -> set[int]:
    return {size for loader in rank.loaders for one in loader.passes for size in one.sizes if size}


def _is_long(tree: Any, sizes: set[int]) -> bool:
    """Whether the first tensor may have its rows along its first dimension: another dimension alone is as long as a batch."""
    shape = next((tensor.shape for tensor in tensors_in(tree) if tensor.ndim), torch.Size())
    return not shape or shape[0] in sizes or sizes.isdisjoint(shape[1:])


def _rows_first(rank: Taken) -> bool:
    """Whether forward may be given rows along the first dimension."""
    first = all(loader.rows_first for loader in rank.loaders)
    return first and all(_is_long([*call.args, *call.kwargs.values()], _sizes(rank)) for call in rank.calls[:1])


def _together(groups: Sequence[tuple[Any, ...]], depth: int = 0) -> list[Any]:
    return [joined(group, depth) if len(group) > 1 else group[0] for group in groups]


def _loader_feeds(ranks: Sequence[Taken], groups: _Groups, one_by_one: bool) -> Iterator[Feed]:
    """Yield the items of all ranks as one item; and the rows that they were made of, for the script's own collator."""
    trains, numbers = of_training(ranks[0].loaders), range(len(ranks[0].loaders))
    passes = [
        [rank.loaders[number].passes[turn] for rank in ranks if _has_pass(rank, number, turn)]
        for number, loader in enumerate(ranks[0].loaders)
        if trains[number]
        for turn in range(len(loader.passes))
    ]
    shared = [ones for ones in passes if len(ones) == len(ranks)]
    moments = [moment for ones in shared for moment in zip(*(own_pass.items for own_pass in ones))]
    fits = one_by_one or all(_fits(moment, alike=False) for moment in moments)
    alike = one_by_one or (fits and all(_fits(moment, alike=True) for moment in moments))
    known = all(len(own_pass.samples) == len(own_pass.items) for ones in shared for own_pass in ones)
    draws = any(loader.draws for rank in ranks for loader in rank.loaders)
    own = any(loader.collates for loader, of_it in zip(ranks[0].loaders, trains) if of_it)
    first = one_by_one or all(loader.rows_first for rank in ranks for loader in rank.loaders)

    def feed(*, collates: bool = True, items: bool = False, rows: bool = True, pads: bool = False) -> Feed:
        loaders = [_loader(ranks, number, groups, items=items, rows=rows) for number in numbers]
        return Feed(Source.LOADER, loaders, pads=pads, collates=collates)

    if not first and (draws or not known):
        raise InvalidArgument(
            f"data: collate_fn makes batches whose rows are not along the first dimension. {_ROWS_FIRST}"
        )
    if not fits and known and draws:
        raise InvalidArgument(
            "data: expected rows of one shape on all ranks, or a collate_fn that pads the same rows in the same way each time, "
            "got one that draws random numbers: its padding cannot be replayed. Draw them in the dataset."
        )
    if not first or (not fits and known):
        yield feed(pads=first)
        return
    replayed = known and not draws and (own or not alike)
    if replayed:
        yield feed(items=alike)
    numbers_of_rank_0 = (draws or not known) and any(has_numbers(item) for moment in moments for item in moment)
    yield replace(feed(collates=False, items=True, rows=replayed), loose=numbers_of_rank_0)


def _has_pass(rank: Taken, number: int, turn: int) -> bool:
    return number < len(rank.loaders) and turn < len(rank.loaders[number].passes)


def _loader(ranks: Sequence[Taken], number: int, groups: _Groups, *, items: bool, rows: bool) -> FedLoader:
    """Return a loader of all ranks; passes that not every rank makes are rank 0's. A loader that only validates is left alone.

    Args:
        ranks: The rows of each rank.
        number: Number of the loader.
        groups: Says which items of the ranks form one item.
        items: Whether items are given.
        rows: Whether the rows that they were made from are given instead, for the loader's collator.
    """
    first = ranks[0].loaders[number]
    if not of_training(ranks[0].loaders)[number]:
        return FedLoader()
    passes: list[list[Any]] = []
    for turn, own in enumerate(first.passes):
        all_ranks = [rank.loaders[number].passes[turn] for rank in ranks if _has_pass(rank, number, turn)]
        if len(all_ranks) < len(ranks):
            passes.append(own.items)
            continue
        given = _together(groups([one.items for one in all_ranks])) if items else repeat(None)
        if rows:
            samples = groups([one.samples for one in all_ranks])
            given = [Uncollated([*chain(*s)], tuple(map(len, s)), item) for s, item in zip(samples, given)]
        passes.append([*given])
    return FedLoader(first.length, passes)
