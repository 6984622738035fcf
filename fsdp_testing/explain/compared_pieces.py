"""What each rank holds of the quantities that are wrong, beside the right values there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.cases.records import ObservedPiece, RankObservation
from fsdp_testing.oracle.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.tensors import difference

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ComparedPiece:
    """Elements of one quantity on one rank.

    Attributes:
        quantity: The quantity.
        rank: The rank that has it.
        span: First element, and the one after the last, in row-major order.
        got: Its numbers, flat; None for a gradient that is None.
        due: The right numbers; None likewise.
        bound: The largest allowed error, one number or one for each element.
        own: The spans of this parameter that the rank has, also for a result that holds whole parameters.
    """

    quantity: Quantity
    rank: int
    span: Span
    got: torch.Tensor | None
    due: torch.Tensor | None
    bound: float | torch.Tensor = 0.0
    own: tuple[Span, ...] = ()

    @property
    def actual(self) -> torch.Tensor:
        """The rank's numbers in the expected dtype; used only if both sides are numbers."""
        assert self.got is not None
        return self.got.to(self.expected.dtype)

    @property
    def expected(self) -> torch.Tensor:
        """The expected numbers; used only if numbers are expected."""
        assert self.due is not None
        return self.due

    @property
    def wrong(self) -> bool:
        """Whether it is beyond its bound, None in place of numbers or the other way round, or of another dtype."""
        if self.got is None or self.due is None:
            return self.got is not self.due
        return self.of_another_size or self.of_another_dtype or difference(self.got, self.due, self.bound).exceeded

    @property
    def of_another_size(self) -> bool:
        """Whether it has another number of elements: texts, which are compared as numbers, may be longer."""
        return self.got is not None and self.due is not None and self.got.numel() != self.due.numel()

    @property
    def of_another_dtype(self) -> bool:
        """Whether the dtype is wrong; gradients, optimizer state and norms may have a dtype of their own."""
        compared = self.quantity.kind in ("value", "buffer", "result") and self.quantity.name != "total_norm"
        return compared and self.got is not None and self.due is not None and self.got.dtype != self.due.dtype

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of another tensor of the quantity's shape."""
        return whole.reshape(-1)[self.span[0] : self.span[1]]

    def is_like(self, variant: Expected) -> bool:
        """Whether it equals the result of another run, within that run's bound."""
        if self.got is None or variant.value is None:
            return self.got is variant.value
        if self.of_another_size or variant.value.numel() < self.span[1]:
            return False
        like = self.part_of(variant.value)
        same_dtype = not self.of_another_dtype or self.got.dtype == like.dtype
        return same_dtype and not difference(self.got, like, _part(variant.bound, self.span)).exceeded


def compared_pieces(
    ranks: Sequence[RankObservation], point: ExpectedPoint, quantities: Iterable[Quantity]
) -> list[ComparedPiece]:
    """Return what every rank has of `quantities` at a point."""
    return [
        _beside(quantity, rank, piece, point)
        for quantity in quantities
        for rank in ranks
        if quantity.rank in (-1, rank.rank)
        for piece in _pieces(rank, point, quantity)
        if piece.stop > piece.start
    ]


def _beside(quantity: Quantity, rank: RankObservation, piece: ObservedPiece, point: ExpectedPoint) -> ComparedPiece:
    span, expected = (piece.start, piece.stop), point.quantities[quantity]
    due = None if expected.value is None else expected.value.reshape(-1)[span[0] : span[1]]
    got = None if piece.value is None else piece.value.reshape(-1)
    snapshot = next((snapshot for snapshot in rank.snapshots if snapshot.index == point.index), None)
    parameter = None if snapshot is None else snapshot.parameters.get(quantity.name.removeprefix("state."))
    own = () if parameter is None else tuple((piece.start, piece.stop) for piece in parameter.pieces)
    return ComparedPiece(quantity, rank.rank, span, got, due, _part(expected.bound, span), own)


def _part(bound: float | torch.Tensor, span: Span) -> float | torch.Tensor:
    return bound.reshape(-1)[span[0] : span[1]] if isinstance(bound, torch.Tensor) and bound.numel() > 1 else bound


def _pieces(rank: RankObservation, point: ExpectedPoint, quantity: Quantity) -> Iterator[ObservedPiece]:
    """One rank's report of one quantity."""
    if quantity.kind == "result":
        result = next((result for result in rank.results if result.index == point.index), None)
        yield from _whole(None if result is None else result.values.get(quantity.name))
        return
    snapshot = next((snapshot for snapshot in rank.snapshots if snapshot.index == point.index), None)
    if snapshot is None:
        return
    if quantity.kind == "buffer":
        buffer = snapshot.buffers.get(quantity.name)
        yield from _whole(None if buffer is None else buffer.value)
        return
    if quantity.kind == "optimizer":
        state = (snapshot.optimizer or {}).get(quantity.name)
        if state is not None and quantity.part in state.scalars:
            yield from _whole(torch.tensor(state.scalars[quantity.part]))
        yield from () if state is None else state.tensors.get(quantity.part, ())
        return
    parameter = snapshot.parameters.get(quantity.name)
    if parameter is not None and quantity.kind == "gradient" and parameter.grad_pieces is None:
        yield from (ObservedPiece(piece.start, piece.stop, None) for piece in parameter.pieces)
    elif parameter is not None:
        yield from parameter.pieces if quantity.kind == "value" else parameter.grad_pieces or ()


def _whole(value: torch.Tensor | None) -> Iterator[ObservedPiece]:
    if value is not None:
        yield ObservedPiece(0, value.numel(), value.reshape(-1))
