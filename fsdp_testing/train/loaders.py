"""Records the rows of a `DataLoader`, pass by pass: by index if the dataset has a length, otherwise by digest.

An augmentation changes a row each time, so runs are compared by the sampler's indices, not by the augmented rows. Indices mean
the same rows only if both runs index the same dataset, which a few rows, fetched with the same random numbers, show.
"""

from __future__ import annotations

import hashlib
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from fsdp_testing.train.batches import local_part, on_cpu, row_digests, tensors_in
from fsdp_testing.train.collators import Collated, Keeping, copied, draws, is_own

_MOST_INDICES = 2**18
_EDGE_ROWS, _MOST_NUMBERS = 64, 64
_PURE = frozenset({"torch", "accelerate", "transformers", "lightning", "builtins"})
"""Packages whose samplers may be run to the end of a pass: they only count and draw."""


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a `DataLoader`.

    Attributes:
        items: The items that were taken.
        samples: The rows that the loader's `collate_fn` made each item from; empty if not kept.
        rows: Digests of the rows of its items.
        indices: Places of its rows in the dataset; all that the sampler gives where `planned`; empty for a stream.
        sizes: How many rows of the dataset each of its items was made from; zeros for a stream.
        complete: Whether all items of the loader were taken.
        planned: Whether `indices` are those of a whole pass.
        trained: Forwards with gradients that ran while the last item taken was one of its own.
        epoch: The epoch by which its sampler shuffles; None without such a sampler.
        epoch_calls: How often `set_epoch` of any `DistributedSampler` had been called before.
    """

    items: list[Any] = field(default_factory=list)
    samples: list[list[Any]] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    indices: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    complete: bool = False
    planned: bool = False
    trained: int = 0
    epoch: int | None = None
    epoch_calls: int = 0

    @property
    def counts(self) -> bool:
        """Whether it may be a pass of the training; reading only the first batch does not count."""
        return self.complete or self.trained > 1

    def has_order_of(self, other: Pass) -> bool:
        """Whether both took more than one row, and in the same order."""
        known = min(len(self.indices), len(other.indices))
        return len(set(self.indices[:known])) > 1 and self.indices[:known] == other.indices[:known]


@dataclass(slots=True)
class LoaderSeen:
    """One `DataLoader`, in the order of first use.

    Attributes:
        length: The result of `len`; None if it was not called or has none.
        passes: Each pass.
        batch: Rows of the first item.
        due: Items of a pass; None where the loader has no length.
        replaces: Whether its sampler draws rows that it has drawn already.
        dataset: Length and digests of a few rows of the dataset that is indexed; empty where it has none or is a stream.
        first_rows: The numbers of its first rows, no more than `_MOST_NUMBERS` of each; empty if they are drawn each time.
        last_rows: Of its last rows, the last one first.
        collates: Whether it has a `collate_fn` that is none of torch's.
        draws: Whether its `collate_fn` draws random numbers, as far as that was tried.
        rows_first: Whether more rows make the tensors of an item longer along their first dimension, as far as that was tried.
    """

    length: int | None = None
    passes: list[Pass] = field(default_factory=list)
    batch: int = 0
    due: int | None = None
    replaces: bool = False
    dataset: tuple[str, ...] = ()
    first_rows: list[torch.Tensor] = field(default_factory=list)
    last_rows: list[torch.Tensor] = field(default_factory=list)
    collates: bool = False
    draws: bool = False
    rows_first: bool = True

    @property
    def trains(self) -> bool:
        """Whether the model was trained on what it gives."""
        return any(own_pass.trained for own_pass in self.passes)

    @property
    def repeats_order(self) -> str:
        """How a sampler that shuffles by epoch came to take two passes in own_pass order; empty if it did not."""
        passes = [own_pass for own_pass in self.passes if own_pass.counts and own_pass.epoch is not None]
        if self.trains:
            passes = [own_pass for own_pass in passes if own_pass.trained]  # the others evaluate
        for first, second in pairwise(passes):
            if first.epoch == second.epoch and first.has_order_of(second):
                return (
                    "is not called"
                    if first.epoch_calls == second.epoch_calls
                    else f"is called with {second.epoch} again"
                )
        return ""


class Drawn:
    """Replaces a sampler, and notes its indices."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.given: list[Any] = []
        self.source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self.given, self.source = given, source = [], iter(self.sampler)

        def draw() -> Iterator[Any]:
            for index in source:
                given.append(index)
                yield index

        return draw()

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


class LoaderWatch:
    """Sees the passes over one `DataLoader`.

    Args:
        loader: Unchanged, except while a pass begins.
        keeps: Whether items, and the rows that they are made of, are kept.
    """

    def __init__(self, loader: DataLoader[Any], keeps: bool) -> None:
        self.loader, self.keeps = loader, keeps
        self.seen = LoaderSeen(collates=is_own(loader.collate_fn))
        self._drawn: Drawn | None = None
        self._open: tuple[Pass, list[Any], Iterator[Any]] | None = None

    def begin(
        self, begin: Callable[[], Iterator[Any]], epoch_calls: int, *, collates: bool = True
    ) -> tuple[Pass, Iterator[Any]]:
        """Begin a pass by `begin`; return the pass and the iterator of its items: uncollated rows without `collates`."""
        loader, seen = self.loader, self.seen
        own = self._watched(begin, collates)
        samplers = list(_samplers(loader))
        epochs = [sampler.epoch for sampler in samplers if _shuffles_by_epoch(sampler)]
        loader_pass = Pass(epoch=epochs[0] if epochs else None, epoch_calls=epoch_calls)
        seen.passes.append(loader_pass)
        given: list[Any] = []
        seen.due = _length(loader)
        seen.replaces = any(bool(getattr(sampler, "replacement", False)) for sampler in samplers)
        if self._drawn is not None:
            given = self._drawn.given
            self._open = loader_pass, given, self._drawn.source
        return loader_pass, self._items(loader_pass, own, given)

    def _items(self, loader_pass: Pass, own: Iterator[Any], given: list[Any]) -> Iterator[Any]:
        index = _index_of(self.loader)
        for number, item in enumerate(own):
            if isinstance(item, Collated):
                if self.keeps:
                    loader_pass.samples.append(on_cpu(item.samples))
                item = item.item
            digests = row_digests(item)
            if self.keeps:
                loader_pass.items.append(on_cpu(item))
            loader_pass.rows += digests
            indices = [index(row) for row in _flat(given[number : number + 1])]
            loader_pass.indices += indices
            loader_pass.sizes.append(len(indices))
            self.seen.batch = self.seen.batch or len(digests)
            loader_pass.complete = number + 1 == self.seen.due
            yield item
        loader_pass.complete = True

    def _watched(self, begin: Callable[[], Iterator[Any]], collates: bool) -> Iterator[Any]:
        """Begin a pass with recorded indices and rows. Afterwards the loader has its own attributes again."""
        loader = self.loader
        watched: dict[str, Any] = {}
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler, collate = loader.__dict__.get(name), loader.__dict__.get("collate_fn")
        if sampler is not None and not isinstance(loader.dataset, IterableDataset):
            if self._drawn is None or self._drawn.sampler is not sampler:
                self._drawn = Drawn(sampler)
            watched[name] = self._drawn
        if (self.keeps or not collates) and loader.batch_sampler is not None and callable(collate):
            watched["collate_fn"] = Keeping(collate) if collates else list
        before = {attribute: loader.__dict__[attribute] for attribute in watched}
        loader.__dict__.update(watched)
        try:
            return begin()
        finally:
            loader.__dict__.update(before)

    def finish(self) -> None:
        """Look, after the training, at what explains its rows: the rest of the last pass, the dataset, the collator."""
        loader, seen = self.loader, self.seen
        index = _index_of(loader)
        for loader_pass in seen.passes:
            loader_pass.planned = loader_pass.complete and bool(loader_pass.indices)
        if self._open is not None and not self._open[0].complete and _is_pure(loader):
            loader_pass, given, source = self._open
            with suppress(Exception):
                rows = [*_flat(given), *islice(_flat(source), _MOST_INDICES + 1)]
                if len(rows) <= _MOST_INDICES:
                    loader_pass.indices, loader_pass.planned = [index(row) for row in rows], True
        if self._drawn is not None:
            dataset = _base(loader)[0]
            seen.dataset = _fingerprint(dataset)
            seen.first_rows, seen.last_rows = _edge_rows(dataset, range), _edge_rows(dataset, _backwards)
        kept = [
            (samples, item)
            for loader_pass in seen.passes
            for samples, item in zip(loader_pass.samples, loader_pass.items)
        ]
        if kept:
            with suppress(Exception), _seeded():
                samples, item = kept[0]
                seen.draws = draws(loader.collate_fn, samples)
                seen.rows_first = _grows_first(item, loader.collate_fn(copied([*samples, *samples])))


def _grows_first(item: Any, twice: Any) -> bool:
    """Whether an item of twice as many rows is longer along the first dimension only; one packed row may be longer."""
    pairs = [
        (one.shape, two.shape) for one, two in zip(tensors_in(item), tensors_in(twice)) if one.ndim == two.ndim > 1
    ]
    return all(one[1:] == two[1:] or one[0] != two[0] or one[0] == 1 for one, two in pairs)


def of_training(loaders: Sequence[LoaderSeen]) -> list[bool]:
    """Return whether each loader belongs to the training: all do where nothing tells them from validation loaders."""
    trains = [loader.trains for loader in loaders]
    return trains if any(trains) else [True] * len(trains)


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, and those that these are made of."""
    waiting: list[Any] = [loader]
    known: list[Any] = []
    while waiting and len(known) < 16:
        owner = waiting.pop(0)
        samplers = [getattr(owner, name, None) for name in ("batch_sampler", "sampler")]
        for sampler in samplers:
            if sampler is not None and not any(sampler is other for other in known):
                known.append(sampler)
                waiting.append(sampler)
                yield sampler


def _shuffles_by_epoch(sampler: Any) -> bool:
    takes_epochs = callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int
    return takes_epochs and getattr(sampler, "shuffle", False) is True


def _is_pure(loader: Any) -> bool:
    return all(type(sampler).__module__.partition(".")[0] in _PURE for sampler in _samplers(loader))


def _length(loader: Any) -> int | None:
    try:
        return len(loader.batch_sampler if loader.batch_sampler is not None else loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _flat(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, (list, tuple)):
            yield from batch
        else:
            yield batch


def _base(loader: Any) -> tuple[Any, list[Sequence[int]]]:
    """Return the dataset that the subsets of a loader are taken from, and the indices of each, outermost first."""
    dataset, maps = loader.dataset, []
    while isinstance(dataset, Subset):
        maps.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, maps


def _index_of(loader: Any) -> Callable[[Any], str]:
    maps = _base(loader)[1]

    def index(row: Any) -> str:
        with suppress(Exception):
            for indices in maps:
                row = indices[row]
            row = operator.index(row)
        return repr(row)

    return index


def _fingerprint(dataset: Any) -> tuple[str, ...]:
    """Return a fingerprint of a dataset: its length, and a few of its rows with seeded generators."""
    try:
        length = len(dataset)
        rows = []
        for place in sorted({0, length // 2, length - 1}):
            rows.append(_digest(_read(dataset, place)))
        return (str(length), *rows)
    except Exception:  # noqa: BLE001 - a dataset of any kind may refuse to be indexed like this
        return ()


def _backwards(length: int) -> range:
    return range(length - 1, -1, -1)


def _edge_rows(dataset: Any, order: Callable[[int], range]) -> list[torch.Tensor]:
    """Return the numbers of the rows that come first in an order; empty if reading them again gives others."""
    with suppress(Exception):
        places = order(len(dataset))[:_EDGE_ROWS]
        rows, again = ([_numbers(_read(dataset, place))[:_MOST_NUMBERS] for place in places] for _ in range(2))
        return rows if all(map(torch.equal, rows, again)) else []
    return []


def _read(dataset: Any, place: int) -> Any:
    with _seeded():  # for each row: what it draws depends on no other
        return dataset[place]


def _numbers(row: Any) -> torch.Tensor:
    """Return the numbers of a row: of its tensors, arrays and numbers."""
    if isinstance(row, (int, float)) or type(row).__module__ == "numpy":
        row = torch.as_tensor(row)
    if isinstance(row, torch.Tensor):
        return torch.empty(0).double() if row.is_complex() else row.detach().double().cpu().reshape(-1)
    parts = row.values() if isinstance(row, Mapping) else row if isinstance(row, (list, tuple)) else ()
    return torch.cat([torch.empty(0).double(), *map(_numbers, parts)])


def _digest(tree: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            part = local_part(part).cpu().contiguous()
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif isinstance(part, Mapping):
            add([value for pair in part.items() for value in pair])
        elif isinstance(part, (list, tuple)):
            for element in part:
                add(element)
        else:
            raw = part.tobytes() if callable(getattr(part, "tobytes", None)) else repr(part).encode()
            digest.update(raw)

    add(tree)
    return digest.hexdigest()


@contextmanager
def _seeded() -> Iterator[None]:
    """Let torch, numpy and Python draw the same random numbers each time; afterwards they go on as before."""
    numpy = sys.modules.get("numpy")
    state, drawn = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        if numpy is not None:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(drawn)
