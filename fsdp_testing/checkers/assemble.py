"""What do the ranks hold together? Local pieces put side by side, with holes and contradictions named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.checkers.tensors import same_bits
from fsdp_testing.records import ObservedPiece

RankPieces = tuple[int, Sequence[ObservedPiece]]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A whole tensor made of the ranks' pieces.

    Attributes:
        flat: All elements; those that no rank holds are 0.
        held: Which elements some rank holds.
        contradictions: Pairs of ranks that hold different bits for the same element, with the first such element.
        owners: Ranks that hold at least one element.
    """

    flat: torch.Tensor
    held: torch.Tensor
    contradictions: tuple[tuple[int, int, int], ...]
    owners: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every element is held by some rank."""
        return bool(self.held.all())

    def first_hole(self) -> int:
        """Return the first element that no rank holds."""
        return int((~self.held).nonzero()[0])


def assemble(ranks: Iterable[RankPieces], shape: Sequence[int]) -> Assembled | None:
    """Put pieces together; None if no rank reports any piece.

    Args:
        ranks: Each rank with its pieces of one tensor.
        shape: Shape of the whole tensor.
    """
    numel = math.prod(shape)
    ranks = list(ranks)
    plain = _side_by_side(ranks, numel)
    if plain is not None:
        return plain
    flat: torch.Tensor | None = None
    source = torch.full((numel,), -1, dtype=torch.int64)
    contradictions: list[tuple[int, int, int]] = []
    owners: list[int] = []
    for rank, pieces in ranks:
        for piece in pieces:
            if flat is None:
                flat = torch.zeros(numel, dtype=piece.value.dtype)
            if piece.start < 0 or piece.stop > numel or piece.value.numel() != piece.stop - piece.start:
                contradictions.append((rank, rank, piece.start))
                continue
            if piece.stop > piece.start:
                owners.append(rank)
                contradictions += _contradiction(flat, source, rank, piece)
                fresh = source[piece.start : piece.stop] < 0
                flat[piece.start : piece.stop][fresh] = piece.value[fresh].to(flat.dtype)
                source[piece.start : piece.stop][fresh] = rank
    if flat is None:
        return None
    return Assembled(flat, source >= 0, tuple(contradictions), tuple(dict.fromkeys(owners)))


def _side_by_side(ranks: Sequence[RankPieces], numel: int) -> Assembled | None:
    """Put together what nearly all implementations hold: pieces that meet, and whole copies of them; else None."""
    known: dict[tuple[int, int], torch.Tensor] = {}
    owners: dict[int, None] = {}
    for rank, pieces in ranks:
        for piece in pieces:
            span = (piece.start, piece.stop)
            if piece.value.numel() != piece.stop - piece.start:
                return None
            if piece.stop > piece.start:
                owners[rank] = None
                if not same_bits(known.setdefault(span, piece.value).reshape(-1), piece.value.reshape(-1)):
                    return None
    end = 0
    for start, stop in sorted(known):
        if start != end:
            return None
        end = stop
    if not end or end != numel or len({value.dtype for value in known.values()}) > 1:
        return None
    flat = torch.cat([known[span].reshape(-1) for span in sorted(known)])
    return Assembled(flat, torch.ones(numel, dtype=torch.bool), (), tuple(owners))


def _contradiction(
    flat: torch.Tensor, source: torch.Tensor, rank: int, piece: ObservedPiece
) -> list[tuple[int, int, int]]:
    """Where `piece` differs from what an earlier rank holds of the same elements."""
    known = source[piece.start : piece.stop] >= 0
    if not bool(known.any()):
        return []
    before, now = flat[piece.start : piece.stop][known], piece.value[known]
    if same_bits(before, now):
        return []
    positions = known.nonzero().reshape(-1) + piece.start
    differs = _differing(before, now)
    first = int(positions[differs][0])
    return [(int(source[first]), rank, first)]


def _differing(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    if before.dtype != now.dtype:
        return torch.ones_like(before, dtype=torch.bool)
    width = before.element_size()
    bits = (
        before.contiguous().view(torch.uint8).reshape(-1, width),
        now.contiguous().view(torch.uint8).reshape(-1, width),
    )
    return (bits[0] != bits[1]).any(dim=1)
