"""The fast path never agrees with what the full comparison would not: any change to what a rank reports is seen by both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.drawing.features import FEATURES
from fsdp_testing.cases.records import (
    BufferObservation,
    Case,
    ObservedPiece,
    OperationResult,
    OptimizerObservation,
    ParameterObservation,
    RankObservation,
    Snapshot,
)
from fsdp_testing.judging.batch_judge import fast_path_agrees
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.replay import Replay, ReplayPoint

EXCLUDED = frozenset(
    name for name in FEATURES if name.startswith(("precision", "dtype.low", "wrap.ignored", "offload", "model.zoo"))
)


def drawn(count: int) -> Iterator[Case]:
    drawer = CaseDrawer(Scope(excluded=EXCLUDED))
    for seed in range(count):
        yield drawer.draw(SeededChoices(seed))


def observed(points: list[ReplayPoint], size: int, *, shard: bool) -> list[RankObservation]:
    """What ranks of a perfect implementation report: shards of the oracle's own numbers, or whole copies."""
    ranks = []
    for rank in range(size):
        results, snapshots = [], []
        for point in points:
            if point.snapshot:
                snapshots.append(_snapshot(point, rank, size, shard=shard))
            else:
                own = {q.name: v.clone() for q, v in point.values.items() if q.rank == rank and v is not None}
                results.append(OperationResult(point.index, own))
        ranks.append(RankObservation(rank, tuple(results), tuple(snapshots)))
    return ranks


def _pieces(value: torch.Tensor, rank: int, size: int, *, shard: bool) -> tuple[ObservedPiece, ...]:
    flat = value.detach().reshape(-1)
    if not shard:
        return (ObservedPiece(0, flat.numel(), flat.clone()),)
    chunk = -(-flat.numel() // size)
    start, stop = min(rank * chunk, flat.numel()), min((rank + 1) * chunk, flat.numel())
    return (ObservedPiece(start, stop, flat[start:stop].clone()),)


def _snapshot(point: ReplayPoint, rank: int, size: int, *, shard: bool) -> Snapshot:
    parameters: dict[str, ParameterObservation] = {}
    optimizer: dict[str, OptimizerObservation] = {}
    buffers: dict[str, BufferObservation] = {}
    for quantity, value in point.values.items():
        name = quantity.name
        if quantity.kind == "value" and value is not None:
            gradient = next((v for q, v in point.values.items() if q.kind == "gradient" and q.name == name), None)
            pieces = _pieces(value, rank, size, shard=shard)
            grads = None if gradient is None else _pieces(gradient, rank, size, shard=shard)
            dtype = str(value.dtype).removeprefix("torch.")
            parameters[name] = ParameterObservation(
                name,
                tuple(value.shape),
                dtype,
                point.requires_grad[name],
                pieces,
                grads,
                None if grads is None else dtype,
            )
        elif quantity.kind == "optimizer" and value is not None:
            held = optimizer.setdefault(name, OptimizerObservation(name, {}, {}))
            if value.numel() == 1 and quantity.part == "step":
                held.scalars[quantity.part] = float(value)  # type: ignore[index]  # made here as a dict
            else:
                held.tensors[quantity.part] = _pieces(value, rank, size, shard=shard)  # type: ignore[index]  # as above
        elif quantity.kind == "buffer" and quantity.rank == rank and value is not None:
            buffers[name] = BufferObservation(name, str(value.dtype).removeprefix("torch."), value.clone())
    return Snapshot(point.index, "", parameters, buffers, optimizer)


def judged(case: Case, ranks: list[RankObservation]) -> list[Any]:
    return list(agreement.compare(oracle.expect_free(case), ranks, agreement.Comparison()).divergences)


@pytest.mark.parametrize("shard", [False, True])
def test_a_perfect_run_agrees_on_the_fast_path_too(shard: bool):
    for case in drawn(40):
        replay = Replay(case)
        points = replay.run()
        ranks = observed(points, case.world.size, shard=shard)
        assert fast_path_agrees(replay, ranks) > 0
        assert not judged(case, ranks)


def tensors_of(ranks: list[RankObservation]) -> Iterator[tuple[RankObservation, torch.Tensor]]:
    for rank in ranks:
        for result in rank.results:
            yield from ((rank, value) for value in result.values.values())
        for snapshot in rank.snapshots:
            for parameter in snapshot.parameters.values():
                for piece in (*parameter.pieces, *(parameter.grad_pieces or ())):
                    yield rank, piece.value
            for buffer in snapshot.buffers.values():
                yield rank, buffer.value
            for state in (snapshot.optimizer or {}).values():
                yield from ((rank, piece.value) for pieces in state.tensors.values() for piece in pieces)


def element(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """The first or last element, as a view: a transposed tensor has none that is flat."""
    return tensor[(place,) * tensor.ndim]


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a thousandth": lambda t: element(t, 0).add_(0.001 * (1 + abs(float(element(t, 0))))),
    "not a number": lambda t: element(t, -1).fill_(float("nan")),
    "infinite": lambda t: element(t, 0).fill_(float("inf")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_changed_tensor_agrees(change: str):
    changed = 0
    for number, case in enumerate(drawn(12)):
        replay = Replay(case)
        points = replay.run()
        ranks = observed(points, case.world.size, shard=number % 2 == 0)
        count = sum(1 for _ in tensors_of(ranks))
        for place in range(0, count, 3):
            spoiled = copy.deepcopy(ranks)
            _, tensor = list(tensors_of(spoiled))[place]
            if not tensor.numel() or not tensor.is_floating_point():
                continue
            CHANGES[change](tensor)
            assert fast_path_agrees(replay, spoiled) < 0
            changed += 1
    assert changed > 50


def spoiled_snapshots(snapshot: Snapshot) -> Iterator[Snapshot]:
    """Every way to report something of another form."""
    for name, held in snapshot.parameters.items():
        others = {key: value for key, value in snapshot.parameters.items() if key != name}
        yield replace(snapshot, parameters=others)
        yield replace(snapshot, parameters={**others, name: replace(held, requires_grad=not held.requires_grad)})
        yield replace(snapshot, parameters={**others, name: replace(held, dtype="float16")})
        if any(piece.stop > piece.start for piece in held.pieces):
            grads = held.pieces if held.grad_pieces is None else None
            dtype = held.dtype if held.grad_pieces is None else None
            yield replace(snapshot, parameters={**others, name: replace(held, grad_pieces=grads, grad_dtype=dtype)})


def test_no_change_of_form_agrees():
    tried = 0
    for case in drawn(10):
        replay = Replay(case)
        points = replay.run()
        ranks = observed(points, case.world.size, shard=True)
        if points[-1].pending:
            continue  # gradients that await reduction are not compared
        held = ranks[1].snapshots[-1]
        for snapshot in spoiled_snapshots(held):
            gone = held.parameters.keys() - snapshot.parameters.keys()
            if gone and all(piece.stop == piece.start for name in gone for piece in held.parameters[name].pieces):
                continue  # a rank without elements need not report
            spoiled = [ranks[0], replace(ranks[1], snapshots=(*ranks[1].snapshots[:-1], snapshot))]
            assert fast_path_agrees(replay, spoiled) < 0
            tried += 1
    assert tried > 30


def test_replicas_that_differ_in_the_last_bit_do_not_agree():
    case = next(case for case in drawn(30) if case.world.size == 2)
    replay = Replay(case)
    points = replay.run()
    ranks = observed(points, 2, shard=False)
    piece = next(
        p.pieces[0]
        for p in ranks[1].snapshots[-1].parameters.values()
        if p.pieces[0].value.numel() and p.dtype == "float64"
    )
    piece.value[0] = torch.nextafter(piece.value[0], torch.tensor(9e9, dtype=piece.value.dtype))
    assert fast_path_agrees(replay, ranks) < 0
    assert any(divergence.kind == "disagreed" for divergence in judged(case, ranks))


def zeros_for_none(snapshot: Snapshot, fill: float) -> tuple[Snapshot, int]:
    """A snapshot with numbers in the place of every gradient that is None."""
    held = {}
    changed = 0
    for name, seen in snapshot.parameters.items():
        if seen.grad_pieces is None:
            pieces = tuple(replace(piece, value=torch.full_like(piece.value, fill)) for piece in seen.pieces)
            changed += sum(piece.stop > piece.start for piece in pieces)
            seen = replace(seen, grad_pieces=pieces, grad_dtype=seen.dtype)
        held[name] = seen
    return replace(snapshot, parameters=held), changed


@pytest.mark.parametrize("none_is_zero", [False, True])
def test_zeros_stand_for_none_only_where_that_is_asked(none_is_zero: bool):
    asked = agreement.Comparison(none_is_zero=none_is_zero)
    tried = 0
    for case in drawn(60):
        replay = Replay(case)
        points = replay.run()
        ranks = observed(points, case.world.size, shard=True)
        held = ranks[0].snapshots[-1]
        for fill in (0.0, 1e-30):
            snapshot, changed = zeros_for_none(held, fill)
            if points[-1].pending or not changed:
                continue
            other = [replace(ranks[0], snapshots=(*ranks[0].snapshots[:-1], snapshot)), *ranks[1:]]
            assert (fast_path_agrees(replay, other, asked) > 0) is (none_is_zero and fill == 0.0)
            tried += 1
    assert tried > 10
