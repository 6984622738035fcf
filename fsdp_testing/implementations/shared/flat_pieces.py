"""Which spans of an original parameter does a piece of a flat parameter hold?

A flat parameter keeps each original in its storage order; reports are in row-major order. Shared by the adapters of
all flat-parameter implementations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp_testing.implementations.protocol import Piece


@dataclass(frozen=True, slots=True)
class FlatOriginal:
    """One original parameter inside a flat parameter.

    Attributes:
        fqn: Original name.
        shape: Whole shape.
        stride: Strides under which the flat parameter stores it.
        contiguous: Whether storage order is row-major order.
        parameter: The original's own object, or None for a plain flat parameter.
        unsharded_start: Offset in the unsharded flat parameter.
        shard_start: Offset in this rank's shard; None if the rank holds none of it.
        first: First held element, in storage order.
        count: Number of held elements.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    parameter: nn.Parameter | None
    unsharded_start: int
    shard_start: int | None
    first: int
    count: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return torch.Size(self.shape).numel()


def spans(
    original: FlatOriginal,
    first: int,
    count: int,
    value: torch.Tensor | None,
    grad: torch.Tensor | None,
    *,
    requires_grad: bool,
) -> Iterator[Piece]:
    """Elements [first, first+count) in storage order as spans in row-major order."""
    whole = partial_piece(original, requires_grad=requires_grad)
    if original.contiguous or count == 0:
        yield replace(whole, start=first, stop=first + count, value=value, grad=grad)
        return
    for offset, start, length in _runs(original, first, count):
        cut = slice(offset, offset + length)
        yield replace(
            whole,
            start=start,
            stop=start + length,
            value=None if value is None else value[cut],
            grad=None if grad is None else grad[cut],
        )


def partial_piece(original: FlatOriginal, *, requires_grad: bool) -> Piece:
    """An empty piece of the original, to be filled."""
    return Piece(original.shape, 0, 0, None, requires_grad=requires_grad)


def _runs(original: FlatOriginal, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """`(offset in the held elements, row-major start, length)` of each run of neighbours."""
    order = torch.empty_strided(original.shape, original.stride, dtype=torch.int64)
    order.copy_(torch.arange(original.numel).view(original.shape))
    logical = order.as_strided((original.numel,), (1,))[first : first + count].tolist()
    begin = 0
    for end in range(1, count + 1):
        if end == count or logical[end] != logical[end - 1] + 1:
            yield begin, logical[begin], end - begin
            begin = end
