"""Keeps a rank's part of a tensor, and assembles the parts of all ranks.

Models of usual test size keep elements. For a larger model, sums of blocks of its larger tensors are kept, each element with its
own fixed sign: then a step keeps the same amount whatever the model's size. Such a sum is linear, so
that what moves an element moves it as much, and the bounds of `comparison`, which go number by number, hold for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from fsdp_testing.adapters.protocol import Piece
from fsdp_testing.oracle.tensors import same_bits

MOST_WHOLE = 2**17
"""Numbers of a model that are kept one by one; of a larger model about as many sums."""
_SMALL = 2**12
"""A tensor of up to this many numbers is kept whole in any model."""
_CHUNK = 2**20
SUMMED_ROUNDINGS = 64
"""Roundings, in its own dtype, between sums of equal numbers that lie on other ranks: they are added up in another order."""


@dataclass(frozen=True, slots=True)
class Span:
    """One rank's part of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        start: First element of this part, in row-major order.
        stop: One past the last.
        values: The elements; with blocks the sum of what lies here of each block that the part touches, in float64.
        block: Number of elements per sum; 1 if elements are kept.
        dtype: Dtype of the tensor.
        digest: Digest of the elements, where sums are kept; else empty.
        places: Indices of the elements in the whole tensor, if they are not consecutive; then `start` and `stop` mean nothing.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    values: torch.Tensor
    block: int = 1
    dtype: torch.dtype = torch.float64
    digest: str = ""
    places: torch.Tensor | None = None

    def equals(self, values: torch.Tensor) -> bool:
        """Whether a part holds the same elements, or NaN nowhere in particular."""
        if self.block > 1:
            return self.digest == _digest(values)
        return torch.equal(self.values, values.detach().cpu().reshape(-1))


def block_of(numbers: int) -> int:
    """Return how many elements make a sum in a model of this many numbers: a power of two, 1 up to `MOST_WHOLE`."""
    return 1 << (-(-numbers // MOST_WHOLE) - 1).bit_length()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph, and without a class of the script's, which other processes do not have."""
    values = tensor.detach()
    # One that takes part in each operation may have no memory of its own.
    own = type(values) is not torch.Tensor and type(values).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return values.as_subclass(torch.Tensor) if own else values


def span_of(piece: Piece, tensor: torch.Tensor, block: int = 1) -> Span:
    """Return the kept values of a tensor in the place of a piece.

    Args:
        piece: Shape of the whole, and place in it.
        tensor: The values, or the gradient, there.
        block: The model's block size.
    """
    shape = tuple(piece.shape)
    if block == 1 or torch.Size(shape).numel() <= _SMALL:
        values = plain(tensor).cpu().reshape(-1).clone()
        return Span(shape, piece.start, piece.stop, values, dtype=values.dtype)
    flat = tensor.detach().reshape(-1)
    sums = _signed_sums(flat, piece.start, piece.stop, block)
    return Span(shape, piece.start, piece.stop, sums, block, tensor.dtype, _digest(tensor))


def _signed_sums(flat: torch.Tensor, start: int, stop: int, block: int) -> torch.Tensor:
    first, last = start // block, -(-stop // block)
    sums = torch.zeros(last - first, dtype=torch.float64)
    # Chunks of whole blocks, so that little memory is needed beside the tensor.
    edges = [*range(first * block, last * block, max(block, _CHUNK)), last * block]
    for low, high in pairwise(edges):
        here = slice(max(low, start) - start, min(high, stop) - start)
        filled = _workspace(max(block, _CHUNK))[: high - low].zero_()
        filled[max(low, start) - low : min(high, stop) - low] = flat[here].cpu()
        signed = filled.view(-1, block).mul_(_signs(block)).sum(1)
        sums[(low - first * block) // block :][: len(signed)] = signed
    return sums


@lru_cache(maxsize=1)
def _workspace(numbers: int) -> torch.Tensor:
    """Return memory for values that are kept: small tensors that stay in the holes of freed large ones make a process grow."""
    return torch.empty(numbers, dtype=torch.float64)


@lru_cache(maxsize=4)
def _signs(block: int) -> torch.Tensor:
    """Return signs from a fixed seed, so that no pattern in a tensor cancels."""
    drawn = torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(block))
    return drawn.double().mul_(2).sub_(1)


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()[:16]


def assembled(ranks: Sequence[tuple[Span, ...]]) -> tuple[torch.Tensor, int | None]:
    """Return the whole tensor, NaN where no rank has any of it, and the first rank that contradicts an earlier one.

    Where blocks are summed, the sums of the whole tensor; all of them NaN if any element is on no rank.
    """
    spans = [(rank, span) for rank, held in enumerate(ranks) for span in held]
    if not spans:
        return torch.full((), torch.nan), None
    first = spans[0][1]
    if any(span.block > 1 for _, span in spans):
        return _assembled_sums(spans)
    full = torch.zeros(torch.Size(first.shape).numel(), dtype=first.values.dtype)
    known, odd = torch.zeros(full.numel(), dtype=torch.bool), None
    for rank, span in spans:
        here = slice(span.start, span.stop) if span.places is None else span.places
        again = known[here]
        if odd is None and bool(again.any()) and not same_bits(full[here][again], span.values[again]):
            odd = rank
        full[here] = torch.where(again, full[here], span.values)
        known[here] = True
    if not bool(known.all()):
        full = full if full.is_floating_point() or full.is_complex() else full.double()  # integers have no NaN
        full[~known] = torch.nan
    return full.view(first.shape), odd


def _assembled_sums(spans: Sequence[tuple[int, Span]]) -> tuple[torch.Tensor, int | None]:
    """Add up the sums of parts; parts are equal on several ranks, or disjoint."""
    sample = next(span for _, span in spans if span.block > 1)
    numbers, covered, odd = torch.Size(sample.shape).numel(), 0, None
    sums = torch.zeros(-(-numbers // sample.block), dtype=torch.float64)
    known: dict[tuple[int, int], str] = {}
    for rank, span in spans:
        place = span.start, span.stop
        if place not in known:
            sums[span.start // span.block :][: len(span.values)] += span.values
            covered += span.stop - span.start
        elif known[place] != span.digest and odd is None:
            odd = rank
        known.setdefault(place, span.digest)
    if covered != numbers:
        sums.fill_(torch.nan)
    return sums.to(sample.dtype), odd
