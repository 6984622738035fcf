"""The numbers that gradients are divided by, before and after they are summed over ranks.

Dividing by the number of ranks in one step underflows before the sum or overflows in it, in half precision. Two
factors near the square root of the world size keep both ends in range. Source: the fairscale and torch FSDP reducers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DivideFactors:
    """Factors whose product is the number of ranks; a factor of 1 means that no division is made."""

    before: float
    after: float

    @classmethod
    def for_world(cls, world_size: int) -> DivideFactors:
        """Return the factors for a mean over ``world_size`` ranks.

        The first one doubles for as long as it divides the world size and stays below what is left.
        """
        # A power of two: dividing by it changes exponents alone, so the first division rounds nothing short of
        # underflow.
        factor = 1
        while world_size % factor == 0 and world_size / factor > factor:
            factor *= 2
        return cls(float(factor), world_size / factor)


def divide(tensor: Tensor, factor: float) -> None:
    """Divide ``tensor`` in place; a factor of 1 costs nothing."""
    if factor != 1:
        tensor.div_(factor)
