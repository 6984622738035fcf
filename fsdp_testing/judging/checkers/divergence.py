"""What a checker reports: one divergence, with its size, its place and its ranks.

A difference within its bound passes, unless it is nearly as large as the numbers compared. A program that amplifies roundings
that much has a bound that would accept a sum for a mean, so its pass would prove nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_testing.cases.records import FailureKind, Mismatch, Tally
from fsdp_testing.oracle.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.tensors import Difference

DECISIVE = 1 / 16
"""Part of the largest number of its kind that an admitted difference may be; a correct run stays far below it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One wrong quantity at one point.

    Attributes:
        kind: `diverged` (from the oracle), `disagreed` (ranks among themselves), `missing` (not reported, or on no rank).
        quantity: The quantity.
        index: Operation after which it was seen.
        ranks: Ranks that hold it.
        sentence: The fault, without subject: "is off by 0.5".
        mismatch: How it differs.
        max_error: Largest absolute difference, where one exists.
        bound: The admissible difference there.
        derivation: Derivation of the bound.
    """

    kind: FailureKind
    quantity: Quantity
    index: int
    ranks: tuple[int, ...]
    sentence: str
    mismatch: Mismatch = Mismatch.NUMBERS
    max_error: float | None = None
    bound: float | None = None
    derivation: str = ""

    @classmethod
    def sized(
        cls,
        quantity: Quantity,
        index: int,
        ranks: tuple[int, ...],
        sentence: str,
        difference: Difference,
        derivation: str = "",
    ) -> Divergence:
        """Return the divergence of numbers that are off by `found`."""
        kind, error, bound = FailureKind.DIVERGED, difference.error, difference.bound
        return cls(kind, quantity, index, ranks, sentence, Mismatch.NUMBERS, error, bound, derivation)


@dataclass(slots=True)
class Compared:
    """What a comparison has seen so far.

    Attributes:
        divergences: Found, in order.
        comparisons: Number of tensors compared.
        worst_ratio: Largest error in units of its bound, over what passed with a bound above zero.
        undecided: Differences within their bound but too large to count as equal.
    """

    divergences: list[Divergence] = field(default_factory=list)
    comparisons: int = 0
    worst_ratio: float = 0.0
    undecided: list[Divergence] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        return Tally(self.comparisons, self.worst_ratio)

    def add(self, divergence: Divergence) -> None:
        self.divergences.append(divergence)

    def count(self) -> None:
        self.comparisons += 1

    def number(
        self,
        point: ExpectedPoint,
        quantity: Quantity,
        ranks: tuple[int, ...],
        difference: Difference,
        expected: Expected,
    ) -> None:
        """Note a comparison of numbers, which may be beyond their bound."""
        if not difference.exceeded:
            self.within(point, quantity, ranks, difference)
            return
        several = expected.value is not None and expected.value.numel() > 1
        where = f", element {difference.position}" if several else ""
        sentence = f"is off by {difference.error:.3g} (bound {difference.bound:.3g}){where}: {difference.text}"
        self.add(Divergence.sized(quantity, point.index, ranks, sentence, difference, expected.derivation))

    def within(self, point: ExpectedPoint, quantity: Quantity, ranks: tuple[int, ...], difference: Difference) -> None:
        """Record a comparison that passed, and mark it undecided if the bound was too wide to mean anything."""
        # Only passed comparisons: a divergence would hide how close the rest came to its bounds.
        self.worst_ratio = max(self.worst_ratio, difference.ratio)
        if difference.error == 0.0 and not difference.blank:
            return
        largest = point.largest(quantity)
        if difference.blank:
            sentence = "holds NaN, as expected; NaN looks the same whatever caused it, so this decides nothing"
        elif difference.error > DECISIVE * largest or not math.isfinite(largest):
            sentence = (
                f"is off by {difference.error:.3g} where no number is larger than {largest:.3g}; "
                f"rounding alone can explain that (bound {difference.bound:.3g}), so this decides nothing"
            )
        else:
            return
        self.undecided.append(Divergence.sized(quantity, point.index, ranks, sentence, difference))
