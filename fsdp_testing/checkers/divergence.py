"""What does a checker say when it finds something? One divergence, with its size, its place and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_testing.checkers.quantities import Quantity


@dataclass(frozen=True, slots=True)
class Divergence:
    """One quantity at one point that is not as it must be.

    Attributes:
        kind: `diverged` (from the oracle), `disagreed` (ranks among themselves), `missing` (not reported, or no rank
            holds it), `raised`.
        quantity: What.
        index: Operation after which it was seen.
        ranks: Who holds it.
        sentence: What is wrong with it, without subject: "is off by 0.5".
        max_error: Largest absolute difference, where one exists.
        bound: The admissible difference there.
        derivation: How the bound came about.
    """

    kind: str
    quantity: Quantity
    index: int
    ranks: tuple[int, ...]
    sentence: str
    max_error: float | None = None
    bound: float | None = None
    derivation: str = ""


@dataclass(slots=True)
class Tally:
    """What a comparison has seen so far.

    Attributes:
        divergences: Found, in order.
        comparisons: Number of tensors compared.
        worst_ratio: Largest error in units of its bound, over what passed with a bound above zero.
    """

    divergences: list[Divergence] = field(default_factory=list)
    comparisons: int = 0
    worst_ratio: float = 0.0

    def add(self, divergence: Divergence) -> None:
        """Notes a divergence."""
        self.divergences.append(divergence)

    def count(self) -> None:
        """Counts one more tensor compared."""
        self.comparisons += 1

    def passed(self, ratio: float) -> None:
        """Notes how close a comparison came to its bound."""
        self.worst_ratio = max(self.worst_ratio, ratio)
