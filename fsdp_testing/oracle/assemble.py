"""Puts the local pieces of all ranks side by side, with holes and contradictions named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.cases.records import ObservedPiece
from fsdp_testing.oracle.tensors import bits, same_bits

RankPieces = tuple[int, Sequence[ObservedPiece]]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A whole tensor made of the ranks' pieces.

    Attributes:
        flat: All elements; those that no rank holds are 0.
        covered: Which elements some rank has; None where that is every one.
        contradictions: Pairs of ranks that hold different bits for the same element, with the first such element.
    """

    flat: torch.Tensor
    covered: torch.Tensor | None
    contradictions: tuple[tuple[int, int, int], ...]

    @property
    def complete(self) -> bool:
        """Whether some rank has every element."""
        return self.covered is None or bool(self.covered.all())

    def first_hole(self) -> int:
        """Return the first element that no rank holds; there is one."""
        return 0 if self.covered is None else int((~self.covered).nonzero()[0])


def assemble(ranks: Iterable[RankPieces], shape: Sequence[int]) -> Assembled | None:
    """Put pieces together; None if no rank reports any piece.

    Args:
        ranks: Each rank with its pieces of one tensor.
        shape: Shape of the whole tensor.
    """
    numel = math.prod(shape)
    ranks = tuple(ranks)
    quick = _plain(ranks, numel)
    if quick is not None:
        return quick
    flat: torch.Tensor | None = None
    source = torch.full((numel,), -1, dtype=torch.int64)
    contradictions: list[tuple[int, int, int]] = []
    for rank, pieces in ranks:
        for piece in pieces:
            if flat is None:
                flat = torch.zeros(numel, dtype=piece.value.dtype)
            if piece.start < 0 or piece.stop > numel or piece.value.numel() != piece.stop - piece.start:
                contradictions.append((rank, rank, piece.start))
                continue
            if piece.stop > piece.start:
                contradictions += _contradiction(flat, source, rank, piece)
                # The first rank that holds an element gives it; what others hold of it was compared just now.
                fresh = source[piece.start : piece.stop] < 0
                flat[piece.start : piece.stop][fresh] = piece.value[fresh].to(flat.dtype)
                source[piece.start : piece.stop][fresh] = rank
    if flat is None:
        return None
    return Assembled(flat, source >= 0, tuple(contradictions))


def _plain(ranks: Sequence[RankPieces], numel: int) -> Assembled | None:
    """The common case, and much faster than element by element: spans side by side, or the same ones with equal bits."""
    spans: dict[tuple[int, int], torch.Tensor] = {}
    for _, pieces in ranks:
        for piece in pieces:
            if piece.stop <= piece.start:
                continue
            value = piece.value if piece.value.dim() == 1 else piece.value.reshape(-1)
            first = spans.setdefault((piece.start, piece.stop), value)
            # The slow way names the ranks that differ, and the element.
            if first is not value and not same_bits(first, value):
                return None
    end = 0
    values: list[torch.Tensor] = []
    for (start, stop), value in sorted(spans.items(), key=lambda item: item[0]):
        if start != end or value.numel() != stop - start or value.dtype != (values or [value])[0].dtype:
            return None
        end = stop
        values.append(value)
    if end != numel or not values:
        return None
    return Assembled(values[0] if len(values) == 1 else torch.cat(values), None, ())


def _contradiction(
    flat: torch.Tensor, source: torch.Tensor, rank: int, piece: ObservedPiece
) -> list[tuple[int, int, int]]:
    """Where `piece` differs from what an earlier rank holds of the same elements."""
    covered = source[piece.start : piece.stop] >= 0
    if not bool(covered.any()):
        return []
    before, now = flat[piece.start : piece.stop][covered], piece.value[covered]
    if same_bits(before, now):
        return []
    positions = covered.nonzero().reshape(-1) + piece.start
    first = int(positions[bits(before) != bits(now)][0] if before.dtype == now.dtype else positions[0])
    return [(int(source[first]), rank, first)]
