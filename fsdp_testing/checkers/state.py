"""Do the ranks' pieces of parameters, gradients, optimizer state and buffers make up the oracle's?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from fsdp_testing.checkers.assemble import Assembled, assemble
from fsdp_testing.checkers.divergence import Divergence, Tally
from fsdp_testing.checkers.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.checkers.results import compare_tensor
from fsdp_testing.checkers.tensors import difference
from fsdp_testing.records import Piece, Snapshot

if TYPE_CHECKING:
    from fsdp_testing.checkers.parity import Comparison

Shapes = Mapping[str, tuple[int, ...]]
RankPieces = list[tuple[int, Sequence[Piece]]]


def check_state(
    tally: Tally, point: ExpectedPoint, shapes: Shapes, snapshots: Sequence[Snapshot], asked: Comparison
) -> None:
    """Compares everything held at one point.

    Args:
        tally: Takes what is found.
        point: What the oracle says.
        shapes: Shape of every parameter.
        snapshots: What each rank reports, by rank.
        asked: Which kinds to compare.
    """
    for quantity, expected in point.quantities.items():
        if any(fnmatchcase(quantity.name, pattern) for pattern in asked.ignore):
            continue
        if quantity.kind == "gradient" and asked.gradients:
            _check_gradient(tally, point, quantity, expected, shapes[quantity.name], snapshots, asked)
        elif quantity.kind == "value":
            _check_value(tally, point, quantity, expected, shapes[quantity.name], snapshots)
        elif quantity.kind == "optimizer" and asked.optimizer:
            _check_optimizer(tally, point, quantity, expected, shapes[quantity.name], snapshots)
        elif quantity.kind == "buffer" and asked.buffers:
            _check_buffer(tally, point, quantity, expected, snapshots)


def absent_snapshot(point: ExpectedPoint, ranks: tuple[int, ...]) -> Divergence:
    """The divergence that ranks did not report their state at a point."""
    return Divergence("missing", Quantity("result", "state"), point.index, ranks, "was not reported")


def _check_value(
    tally: Tally,
    point: ExpectedPoint,
    quantity: Quantity,
    expected: Expected,
    shape: tuple[int, ...],
    snapshots: Sequence[Snapshot],
) -> None:
    held: RankPieces = []
    for rank, snapshot in enumerate(snapshots):
        seen = snapshot.parameters.get(quantity.name)
        if seen is None:
            continue
        held.append((rank, seen.pieces))
        wanted = point.dtypes.get(quantity.name, seen.dtype)
        if seen.dtype and seen.dtype != wanted:
            _report(tally, "diverged", quantity, point.index, (rank,), f"has dtype {seen.dtype}, expected {wanted}")
        flag = point.requires_grad.get(quantity.name, seen.requires_grad)
        if seen.requires_grad != flag:
            sentence = f"has requires_grad={seen.requires_grad}, expected {flag}"
            _report(tally, "diverged", quantity, point.index, (rank,), sentence)
    _check_pieces(tally, point.index, quantity, held, expected, shape)


def _check_gradient(
    tally: Tally,
    point: ExpectedPoint,
    quantity: Quantity,
    expected: Expected,
    shape: tuple[int, ...],
    snapshots: Sequence[Snapshot],
    asked: Comparison,
) -> None:
    if point.pending:
        return
    held: RankPieces = []
    without: list[int] = []
    for rank, snapshot in enumerate(snapshots):
        seen = snapshot.parameters.get(quantity.name)
        if seen is None:
            continue
        if seen.grad_pieces is not None:
            held.append((rank, seen.grad_pieces))
            if seen.dtype and seen.grad_dtype != seen.dtype:
                sentence = f"has dtype {seen.grad_dtype}, expected {seen.dtype}"
                _report(tally, "diverged", quantity, point.index, (rank,), sentence)
        elif any(piece.stop > piece.start for piece in seen.pieces):
            without.append(rank)
    if expected.value is None:
        _check_none(tally, point.index, quantity, held, none_is_zero=asked.none_is_zero)
        return
    if without and not (asked.none_is_zero and not bool(expected.value.any())):
        size = float(expected.value.abs().max()) if expected.value.numel() else 0.0
        sentence = f"is None, expected numbers (up to {size:.3g})"
        _report(tally, "diverged", quantity, point.index, tuple(without), sentence)
    elif not without:
        _check_pieces(tally, point.index, quantity, held, expected, shape)
    else:
        tally.comparisons += 1


def _check_none(tally: Tally, index: int, quantity: Quantity, held: RankPieces, *, none_is_zero: bool) -> None:
    tally.comparisons += 1
    for rank, pieces in held:
        filled = [piece for piece in pieces if piece.stop > piece.start]
        size = max((float(piece.value.abs().max()) for piece in filled), default=0.0)
        if filled and not (none_is_zero and size == 0.0):
            sentence = f"holds numbers (up to {size:.3g}), expected None"
            _report(tally, "diverged", quantity, index, (rank,), sentence)


def _check_optimizer(
    tally: Tally,
    point: ExpectedPoint,
    quantity: Quantity,
    expected: Expected,
    shape: tuple[int, ...],
    snapshots: Sequence[Snapshot],
) -> None:
    if any(snapshot.optimizer is None for snapshot in snapshots) or expected.value is None:
        return
    held: RankPieces = []
    scalars: list[tuple[int, float]] = []
    for rank, snapshot in enumerate(snapshots):
        state = (snapshot.optimizer or {}).get(quantity.name)
        if state is not None and quantity.part in state.tensors:
            held.append((rank, state.tensors[quantity.part]))
        elif state is not None and quantity.part in state.scalars:
            scalars.append((rank, state.scalars[quantity.part]))
    if scalars and expected.value.numel() == 1:
        for rank, number in scalars:
            actual = torch.tensor(number, dtype=expected.value.dtype).reshape(expected.value.shape)
            compare_tensor(tally, point.index, quantity._replace(rank=rank), actual, expected)
        return
    _check_pieces(tally, point.index, quantity, held, expected, shape)


def _check_buffer(
    tally: Tally, point: ExpectedPoint, quantity: Quantity, expected: Expected, snapshots: Sequence[Snapshot]
) -> None:
    seen = snapshots[quantity.rank].buffers.get(quantity.name)
    if seen is None:
        _report(tally, "missing", quantity, point.index, (quantity.rank,), "is gone")
        return
    compare_tensor(tally, point.index, quantity, seen.value, expected)


def _check_pieces(
    tally: Tally, index: int, quantity: Quantity, held: RankPieces, expected: Expected, shape: tuple[int, ...]
) -> None:
    """Compares a tensor that the ranks hold together: nothing missing, replicas equal, numbers within the bound."""
    if expected.value is None or not expected.value.numel():
        return
    tally.comparisons += 1
    whole = assemble(held, shape)
    if whole is None or not whole.complete:
        where = "" if whole is None else f" from element {whole.first_hole()} on"
        _report(tally, "missing", quantity, index, (), f"is held by no rank{where}")
        return
    for one, other, position in whole.contradictions[:1]:
        sentence = f"differs between ranks {one} and {other}, first in element {position}"
        _report(tally, "disagreed", quantity, index, (one, other), sentence)
    _check_numbers(tally, index, quantity, held, whole, expected)


def _check_numbers(
    tally: Tally, index: int, quantity: Quantity, held: RankPieces, whole: Assembled, expected: Expected
) -> None:
    if expected.value is None:
        return
    found = difference(whole.flat, expected.value, expected.bound)
    if not found.exceeded:
        tally.worst_ratio = max(tally.worst_ratio, found.ratio)
        return
    ranks = tuple(rank for rank, pieces in held if _diverges(pieces, expected))
    sentence = (
        f"is off by {found.error:.3g} (bound {found.bound:.3g}), "
        f"element {found.position} is {found.actual!r} for {found.expected!r}"
    )
    tally.divergences.append(
        Divergence("diverged", quantity, index, ranks, sentence, found.error, found.bound, expected.derivation)
    )


def _diverges(pieces: Sequence[Piece], expected: Expected) -> bool:
    """Whether this rank's own pieces are beyond the bound."""
    if expected.value is None:
        return False
    flat = expected.value.reshape(-1)
    bound = expected.bound
    for piece in pieces:
        span = slice(piece.start, piece.stop)
        limit = bound.reshape(-1)[span] if isinstance(bound, torch.Tensor) and bound.numel() > 1 else bound
        if piece.stop > piece.start and difference(piece.value, flat[span], limit).exceeded:
            return True
    return False


def _report(tally: Tally, kind: str, quantity: Quantity, index: int, ranks: tuple[int, ...], sentence: str) -> None:
    tally.divergences.append(Divergence(kind, quantity, index, ranks, sentence))
