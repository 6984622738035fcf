"""What are wrong numbers like, element by element? Rounded, scaled, in other places, or those of something else.

Each is tried against what one process has and taken only if every element agrees, within the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from fsdp_testing.checkers.quantities import Expected, Quantity
from fsdp_testing.checkers.tensors import difference
from fsdp_testing.records import UNIT_ROUNDOFF

_ENOUGH = 2
"""Elements without which any two numbers are a multiple of one another."""
_ROUNDINGS = 4
"""Of one element that is computed from the expected one, in its own dtype."""
_LARGEST_DENOMINATOR = 8


@dataclass(frozen=True, slots=True)
class Pattern:
    """What wrong numbers are like.

    Attributes:
        kind: The same word for all quantities that one defect makes wrong.
        words: Of one quantity, after "is": "1/2 of what is due".
    """

    kind: str
    words: str


def pattern_of(
    quantity: Quantity, got: torch.Tensor, expected: Expected, others: Mapping[Quantity, Expected]
) -> Pattern | None:
    """Return what the numbers of one quantity are like, or None if like nothing that is tried.

    Args:
        quantity: The one that is wrong.
        got: Its numbers, put together from all ranks.
        expected: What they should be.
        others: Everything that is expected at the same point.
    """
    due = expected.value
    if due is None or due.numel() < _ENOUGH or not due.is_floating_point() or got.numel() != due.numel():
        return None
    got = got.reshape(due.shape).to(due.dtype)
    if not bool(got.isfinite().all() & due.isfinite().all()):
        return None
    unit = UNIT_ROUNDOFF.get(str(due.dtype).removeprefix("torch."), 0.0)
    bound = expected.bound + _ROUNDINGS * unit * due.abs()
    if not difference(got, due, bound).exceeded:
        return None  # as near to what is due as to anything else
    tried = _tried(quantity, got, due, others)
    return next(
        (Pattern(kind, words) for kind, words, like in tried if not difference(got, like, bound).exceeded), None
    )


def _tried(
    quantity: Quantity, got: torch.Tensor, due: torch.Tensor, others: Mapping[Quantity, Expected]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kinds of patterns, their words, and the numbers that would be right if it were so."""
    yield "zero", "zero", torch.zeros_like(due)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if torch.finfo(dtype).eps > torch.finfo(due.dtype).eps:
            yield "rounded", f"what is due, rounded to {str(dtype).removeprefix('torch.')}", due.to(dtype).to(due.dtype)
    square = float(due.double().square().sum())
    factor = float((got.double() * due.double()).sum()) / square if square else 0.0
    if factor:
        small = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
        exact = abs(float(small) - factor) < 1e-9 * abs(factor)
        yield "scaled", f"{small if exact else f'{factor:.6g}'} times what is due", due * factor
    for other, one in others.items():
        same = (other.kind, other.part) == (quantity.kind, quantity.part) and other.rank in (-1, quantity.rank)
        if same and other != quantity and one.value is not None and one.value.shape == due.shape:
            yield "another's", f"what is due of {other}", one.value
    flat = due.reshape(-1)
    for shift in (1, -1, due.numel() // 2):
        yield (
            "shifted",
            f"what is due, moved by {shift} {'element' if abs(shift) == 1 else 'elements'}",
            flat.roll(shift).reshape(due.shape),
        )
    if due.numel() > 2 * _ENOUGH:
        # Each at the place of its rank among all: equal only if the numbers are the same ones.
        ordered = torch.empty_like(flat)
        ordered[got.reshape(-1).argsort()] = flat.sort().values
        yield "permuted", "what is due, its elements in other places", ordered.reshape(due.shape)
