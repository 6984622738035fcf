"""Half-open ranges of elements.

Every range in the package is one of these: ``start`` belongs to it, ``stop`` does not. Empty spans are legal and
common (a rank beyond the end of a small parameter has one).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ref.errors import LayoutError, explain


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``start, start + 1, ..., stop - 1``; both ends in elements, never negative."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuse a span that ends before it starts or starts before zero."""
        if not 0 <= self.start <= self.stop:
            raise LayoutError(
                explain(
                    "Span",
                    expected="0 <= start <= stop",
                    got=f"start={self.start}, stop={self.stop}",
                    remedy="Give the first element and one past the last",
                )
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.start <= index < self.stop

    def as_slice(self) -> slice:
        """Return the span as an index for a flat tensor or a list."""
        return slice(self.start, self.stop)
