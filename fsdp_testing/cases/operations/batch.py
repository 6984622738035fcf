"""The inputs of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_testing.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one micro-batch, different on every rank.

    Attributes:
        seed: Together with the rank it determines every number of the inputs and targets.
        rows: Number of rows, one entry for all ranks or one per rank (cycled); 0 is an empty batch.
        usage: Which optional branches of the model run, one mask for all ranks or one per rank (cycled); an empty tuple
            uses all. Models without branches ignore it.
        scale: Factor on the inputs, so that micro-batches can be distinguished by magnitude.
        alike: Every rank has the inputs of rank 0, so that gradients that nobody reduces are the mean as well.
    """

    seed: int
    rows: tuple[int, ...] = (4,)
    usage: tuple[tuple[bool, ...], ...] = ()
    scale: float = 1.0
    alike: bool = False

    def __post_init__(self) -> None:
        if not self.rows or any(rows < 0 for rows in self.rows):
            raise InvalidRecord(f"Batch.rows: expected one or more sizes >= 0, got {self.rows}. Give rows=(4,).")

    def rows_of(self, rank: int) -> int:
        """Return the number of rows of `rank`."""
        return self.rows[rank % len(self.rows)]

    def usage_of(self, rank: int) -> tuple[bool, ...] | None:
        """Return the usage mask of `rank`, or None if every branch runs."""
        return self.usage[rank % len(self.usage)] if self.usage else None

    def without_rank(self, rank: int, size: int) -> Batch:
        """Return the batch of `size` ranks that is empty on `rank`."""
        return replace(self, rows=tuple(0 if other == rank else self.rows_of(other) for other in range(size)))

    def required(self) -> frozenset[str]:
        """Return the capabilities that such inputs need."""
        uneven = {"uneven_batches"} if len(set(self.rows)) > 1 or 0 in self.rows else set()
        partial = {"unused_parameters"} if any(not all(mask) for mask in self.usage) else set()
        differ = {"unused_parameters_differ"} if len(set(self.usage)) > 1 else set()
        return frozenset(uneven | partial | differ)

    def plain(self) -> Batch:
        """Return the simplest batch with the same numbers: two rows on every rank."""
        return Batch(self.seed, (2,))

    def simpler(self) -> Iterator[Batch]:
        """Yield batches that are simpler by one part, the boldest first; some may be equal to this one."""
        yield self.plain()
        yield replace(self, usage=())
        yield replace(self, usage=self.usage[:1])
        yield replace(self, rows=(2,))
        yield replace(self, scale=1.0)
        yield replace(self, seed=1)

    def script_arguments(self) -> str:
        """Return the batch as arguments in the source of a script."""
        return f"{self.seed}, {self.rows!r}, {self.usage!r}, {self.scale!r}"
