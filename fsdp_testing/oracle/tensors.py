"""Compares two tensors, within a bound or to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

GARBAGE = 1e37
"""Fresh memory holds larger numbers while a case is judged (`execute.filled_with_garbage`), half and a quarter of them too."""
TINY = 1e-7
"""Numbers smaller than garbage by this factor do not count as garbage."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from what was expected.

    Attributes:
        error: Largest absolute difference; infinite where one side is not finite and the other is.
        bound: The bound at the element with the largest error minus bound; if all are within bounds, with the largest error.
        position: Flat index of that element.
        ratio: Error over bound at that element; 0 if both are 0.
        exceeded: Whether any element is beyond its bound.
        actual: The number there.
        expected: The number expected there.
        blank: Whether NaN stands where NaN is expected: one looks like another.
    """

    error: float
    bound: float
    position: int
    ratio: float
    exceeded: bool
    actual: float
    expected: float
    blank: bool = False

    @property
    def text(self) -> str:
        """Both numbers, and for one that is not finite or is far too large the likely reason."""
        text = "got {!r}, expected {!r}".format(*shortened(self.actual, self.expected))
        if not abs(self.expected) < GARBAGE * TINY:
            return text
        if math.isnan(self.actual):
            return f"{text}; NaN may be a collective's result read before it was waited for"
        if math.isinf(self.actual):
            return f"{text}; an infinity may be an overflow, or memory that was never written, added up"
        if abs(self.actual) > GARBAGE:
            return f"{text}; numbers as large as this may be padding or a buffer that was never written"
        return text


EQUAL = Difference(0.0, 0.0, 0, 0.0, exceeded=False, actual=0.0, expected=0.0)


def largest(value: torch.Tensor | None) -> float:
    """Return the largest absolute number; 0 where there is none, or all are whole numbers by their dtype."""
    return float(value.abs().max()) if value is not None and value.numel() and value.is_floating_point() else 0.0


def shortened(left: float, right: float) -> tuple[float, float]:
    """Return both numbers with the fewest digits, at least four, that show their difference to a twentieth."""
    allowed = abs(left - right) / 20
    for digits in range(4, 17):
        short = float(f"{left:.{digits}g}"), float(f"{right:.{digits}g}")
        if not math.isfinite(allowed) or abs(short[0] - left) + abs(short[1] - right) <= allowed:
            return short
    return left, right


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both hold the same dtype, shape and bits: NaN equals NaN, and 0.0 differs from -0.0."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def difference_in_bits(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how two tensors differ, to the bit, as the rest of a sentence that begins with their name; empty if equal."""
    if same_bits(actual, expected):
        return ""
    if actual.shape != expected.shape:
        return f": got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f": got {actual.dtype}, expected {expected.dtype}"
    got, wanted = actual.reshape(-1), expected.reshape(-1)
    element = int((bits(got) != bits(wanted)).nonzero()[0])
    return f", element {element}: got {got[element].item()!r}, expected {wanted[element].item()!r}"


def difference(actual: torch.Tensor, expected: torch.Tensor, bound: float | torch.Tensor) -> Difference:
    """Compare element by element; both tensors have the same shape.

    A bound of 0 admits equal numbers only (0.0 and -0.0 are equal numbers). NaN where a number is expected, or a
    number where NaN is expected, is an infinite error.
    """
    if not expected.numel():
        return EQUAL
    # The common case, and much faster than looking for the largest difference.
    if actual.dtype == expected.dtype:
        alike = actual.shape == expected.shape
        if torch.equal(actual, expected) if alike else torch.equal(actual.reshape(-1), expected.reshape(-1)):
            return EQUAL
    left, right = actual.reshape(-1).to(torch.float64), expected.reshape(-1).to(torch.float64)
    limit = torch.as_tensor(bound, dtype=torch.float64).reshape(-1).expand(right.shape)
    error = (left - right).abs()
    blank = left.isnan() & right.isnan()
    error = torch.where((left == right) | blank, 0.0, error)
    error = torch.where(error.isnan(), math.inf, error)
    excess = error - limit
    excess = torch.where(excess.isnan(), math.inf, excess)
    exceeded = bool((excess > 0).any())
    position = int((excess if exceeded else error).argmax())
    worst, allowed = float(error[position]), float(limit[position])
    ratios = torch.where(limit > 0, error / limit, torch.where(error > 0, math.inf, 0.0))
    return Difference(
        error=worst,
        bound=allowed,
        position=position,
        ratio=float(ratios.max()),
        exceeded=exceeded,
        actual=float(left[position]),
        expected=float(right[position]),
        blank=bool(blank.any()),
    )
