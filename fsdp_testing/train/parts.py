"""Finds each rank's part of the parameters of one process, if ranks share the work on the same rows. Pure.

Tensor parallelism by hand, pipeline stages and experts keep plain tensors, and nothing says what these are parts of. Each is
identified by its values before the first step: they are those of a parameter of one process, whatever its name, or of slices of
the parameter with its name. A parameter that is the same everywhere (ones, zeros) goes with the others of its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from fsdp_testing.train.on_rank import RankReport
from fsdp_testing.train.quantities import Kind, Quantity, QuantitySpans, spans_of_kind
from fsdp_testing.train.spans import Span
from fsdp_testing.train.steps import StepSeen
from fsdp_testing.train.whole import Place, WholeRun, initial, whole

Places = Mapping[str, Place]
"""By the name that a rank has for its parameter."""


def with_parts_in_place(alone: WholeRun, run: WholeRun) -> WholeRun:
    """Return the run with each rank's parts where they lie in one process; unchanged if there are none or one is unknown."""
    due = {key.name: values[0] for key, values in initial(alone).items()}
    ranks = [_whole_here(rank) for rank in run.ranks]
    if any(held is None for held in ranks) or all(_is_replica(held or {}, due) for held in ranks):
        return run
    places = [_places(held or {}, due, rank, run.size) for rank, held in enumerate(ranks)]
    if any(known is None for known in places):
        return run
    return in_place(run, tuple(known or {} for known in places))


def in_place(run: WholeRun, parts: tuple[Places, ...]) -> WholeRun:
    """Return a run with the parameters of each rank where they lie in one process; unchanged without places."""
    if not parts:
        return run
    moved = [_moved(report, places) for report, places in zip(run.ranks, parts, strict=True)]
    return replace(whole(run.size, moved), parts=parts)


def _is_replica(held: Mapping[str, torch.Tensor], due: Mapping[str, torch.Tensor]) -> bool:
    return {*held} == {*due} and all(_same(held[name], due[name]) for name in held)


def _whole_here(rank: RankReport) -> dict[str, torch.Tensor] | None:
    """Return the parameters with which a rank began; None where it has spans or sums of some, as sharding keeps them."""
    held: dict[str, torch.Tensor] = {}
    for step in rank.steps:
        for name, spans in spans_of_kind(step.before, Kind.PARAMETER).items():
            if name in held:
                continue
            if [(span.start, span.stop, span.block) for span in spans] != [(0, torch.Size(spans[0].shape).numel(), 1)]:
                return None
            held[name] = spans[0].values.view(spans[0].shape)
    return held


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _tells(values: torch.Tensor) -> bool:
    """Whether values identify their parameter: constant values do not."""
    return values.numel() > 1 and bool((values != values.reshape(-1)[0]).any())


def _places(
    held: Mapping[str, torch.Tensor], due: Mapping[str, torch.Tensor], rank: int, size: int
) -> dict[str, Place] | None:
    """Return the place of each parameter of a rank, None if one is not known or two have the same."""
    by_values = {name: _by_values(name, values, due) for name, values in held.items() if _tells(values)}
    if None in by_values.values():
        return None
    known = {name: place for name, place in by_values.items() if place is not None}
    for name, values in held.items():
        if name not in known:
            place = _beside_others(name, values, due, known) or _by_rank(name, values, due, (rank, size))
            if place is None:
                return None
            known[name] = place
    names = [place.name for place in known.values()]
    return known if len({*names}) == len(names) else None


def _by_values(name: str, values: torch.Tensor, due: Mapping[str, torch.Tensor]) -> Place | None:
    if name in due and _same(values, due[name]):
        return Place(name, tuple(values.shape))
    if name in due:
        part = _slices(name, values, due[name])
        if part is not None:
            return part
    same = [other for other, whole_ in due.items() if _same(values, whole_)]
    return Place(same[0], tuple(values.shape)) if len(same) == 1 else None


def _cut(values: torch.Tensor, whole_: torch.Tensor) -> int | None:
    """Return the one dimension along which a part is smaller than the whole; None without one."""
    if values.ndim != whole_.ndim:
        return None
    shorter = [dim for dim, (a, b) in enumerate(zip(values.shape, whole_.shape)) if a != b]
    return shorter[0] if len(shorter) == 1 and values.shape[shorter[0]] < whole_.shape[shorter[0]] else None


def _slices(name: str, values: torch.Tensor, whole_: torch.Tensor) -> Place | None:
    dim = _cut(values, whole_)
    if dim is None:
        return None
    numbers: dict[bytes, list[int]] = {}
    for number, part in enumerate(whole_.unbind(dim)):
        numbers.setdefault(_bytes(part), []).append(number)
    index = [numbers.get(_bytes(part), []) for part in values.unbind(dim)]
    if any(len(place) != 1 for place in index):
        return None
    return Place(name, tuple(whole_.shape), dim, tuple(place[0] for place in index))


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _beside_others(name: str, values: torch.Tensor, due: Mapping[str, torch.Tensor], known: Places) -> Place | None:
    """Return the place of a constant parameter among those of its module, or of the module around it."""
    for prefix, other in _moves(name, known):
        there = other + name.removeprefix(prefix)
        if there not in due:
            continue
        if _same(values, due[there]):
            return Place(there, tuple(values.shape))
        dim = _cut(values, due[there])
        module = name.rpartition(".")[0]
        beside = [place for at, place in known.items() if at.rpartition(".")[0] == module and place.dim == dim == 0]
        if beside and len(beside[0].index) == values.shape[0]:
            return Place(there, tuple(due[there].shape), 0, beside[0].index)
        return None
    return None


def _moves(name: str, known: Places) -> Iterator[tuple[str, str]]:
    """Yield the names of the modules around a parameter here and in one process, the nearest first."""
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        prefix = "".join(f"{part}." for part in parts[:count])
        others = {
            place.name.removesuffix(at.removeprefix(prefix))
            for at, place in known.items()
            if at.startswith(prefix) and place.name.endswith(at.removeprefix(prefix))
        }
        if len(others) == 1:
            yield prefix, others.pop()


def _by_rank(name: str, values: torch.Tensor, due: Mapping[str, torch.Tensor], world: tuple[int, int]) -> Place | None:
    """Return the place of a constant part where each rank has its block of a parameter, in their order."""
    rank, size = world
    dim = _cut(values, due[name]) if name in due else None
    if dim is None or values.shape[dim] * size != due[name].shape[dim]:
        return None
    length = values.shape[dim]
    part = due[name].narrow(dim, rank * length, length)
    index = tuple(range(rank * length, (rank + 1) * length))
    return Place(name, tuple(due[name].shape), dim, index) if _same(values, part) else None


def _moved(report: RankReport, places: Places) -> RankReport:
    positions = {name: place.positions() for name, place in places.items()}
    whole_names = {name: place.name for name, place in places.items() if place.dim is None}

    def moved(spans: QuantitySpans) -> QuantitySpans:
        return dict(_in_place(key, held, places, positions) for key, held in spans.items())

    def moved_step(seen: StepSeen) -> StepSeen:
        return replace(
            seen,
            before=moved(seen.before),
            after=moved(seen.after),
            unreduced=tuple(places[name].name if name in places else name for name in seen.unreduced),
            terms=replace(
                seen.terms,
                passes=tuple(
                    {whole_names[name]: term for name, term in terms.items() if name in whole_names}
                    for terms in seen.terms.passes
                ),
            ),
        )

    weights = moved({Quantity(Kind.PARAMETER, name): spans for name, spans in report.weights.items()})
    steps = tuple(map(moved_step, report.steps))
    return replace(report, copies={}, weights=spans_of_kind(weights, Kind.PARAMETER), steps=steps)


def _in_place(
    key: Quantity, held: tuple[Span, ...], places: Places, positions: Mapping[str, torch.Tensor | None]
) -> tuple[Quantity, tuple[Span, ...]]:
    if key.kind is Kind.BUFFER:
        names = (there + key.name.removeprefix(here) for here, there in _moves(key.name, places))
        return replace(key, name=next(names, key.name)), held
    place = places.get(key.name)
    if place is None:
        return key, held
    index = positions[key.name]
    spans = (
        held if index is None else tuple(replace(s, shape=place.shape, places=index) if s.shape else s for s in held)
    )
    return replace(key, name=place.name), spans


def takers(alone: WholeRun, run: WholeRun) -> tuple[int, ...]:
    """Return the ranks whose rows count, where ranks share the work on rows: one of each that take the same ones.

    The later stages of a pipeline take what the first one computes, which is no data.
    """
    known = {row for step in range(alone.steps) for row in alone.union(step)}
    first: dict[tuple[tuple[str, ...], ...], int] = {}
    for rank in range(run.size):
        rows = tuple(step[rank] for step in run.rows)
        if not run.parts or any(row in known for step in rows for row in step):
            first.setdefault(rows, rank)
    return tuple(first.values()) or tuple(range(run.size))


def loading(run: WholeRun, taking: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks whose DataLoaders count: one of each that load the same rows, of more ranks than those `taking` some.

    Ranks may load rows of their own, and send these to one another before a part of the model takes all of them (a table of
    embeddings).
    """
    first: dict[tuple[tuple[str, ...], ...], int] = {}
    for rank, report in enumerate(run.ranks):
        loaded = tuple(tuple(one.rows) for loader in report.taken.loaders for one in loader.passes)
        first.setdefault(loaded, rank)
    return tuple(first.values()) if len(first) > len(taking) else taking


def doubled(run: WholeRun) -> int:
    """Return how many ranks do the work of one: the same part of it on the same rows; 1 where each does its own."""
    shares = [
        (
            tuple(step[rank] for step in run.rows),
            str(sorted(run.parts[rank].items())) if run.parts else "",
            report.steps[0].share,
            tuple(tuple(f"{loss:.6g}" for loss in seen.losses) for seen in report.steps),
        )
        for rank, report in enumerate(run.ranks)
    ]
    return min(shares.count(one) for one in shares) if any(run.rows[0]) else 1


def shares_rows(run: WholeRun) -> bool:
    """Whether ranks have their parts of the model, or take the same rows."""
    return run.shares_work or len({tuple(step[rank] for step in run.rows) for rank in range(run.size)}) == 1
