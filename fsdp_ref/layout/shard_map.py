"""The elements of each parameter that rank r of n has.

A flat buffer is cut into equal chunks, the last ones short or empty, exactly as ``torch.chunk`` cuts a flat tensor;
each rank's chunk is then padded on the right to the common size. Everything is computed for the rank that is asked
about: 100,000 parameters on 16,384 ranks cost no more than one rank's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fsdp_ref.errors import LayoutError, explain
from fsdp_ref.layout.span import Span

if TYPE_CHECKING:
    from fsdp_ref.layout.flat_layout import FlatLayout


class ParamSpan(NamedTuple):
    """A piece of one parameter inside one shard."""

    param_index: int
    """Position of the parameter in the layout."""
    span_in_param: Span
    """The piece, counted from the parameter's first element in storage order."""
    offset_in_shard: int
    """Where the piece begins inside the shard."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The shards of one layout over ``world_size`` ranks.

    Ten elements over four ranks, ``.`` an element and ``p`` right padding::

        rank 0  [0, 3)    . . .
        rank 1  [3, 6)    . . .
        rank 2  [6, 9)    . . .
        rank 3  [9, 10)   . p p

    Attributes:
        layout: the flat buffer that is cut.
        world_size: number of ranks in the shard group, at least 1.
    """

    layout: FlatLayout
    world_size: int

    def __post_init__(self) -> None:
        """Refuse a group without ranks."""
        if self.world_size < 1:
            raise LayoutError(
                explain("ShardMap", expected="a world size of at least 1", got=str(self.world_size), remedy="Pass it")
            )

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard, right padding included: the same number on all ranks."""
        return -(-self.layout.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered buffer: all shards with their padding."""
        return self.shard_numel * self.world_size

    def shard_span(self, rank: int) -> Span:
        """Return the elements of the flat buffer that ``rank`` has, without right padding; possibly empty."""
        self._check_rank(rank)
        size, total = self.shard_numel, self.layout.numel
        return Span(min(rank * size, total), min((rank + 1) * size, total))

    def padding(self, rank: int) -> int:
        """Return the right padding of ``rank``'s shard, in elements."""
        return self.shard_numel - self.shard_span(rank).numel

    def param_spans(self, rank: int) -> tuple[ParamSpan, ...]:
        """Return every piece of a parameter in ``rank``'s shard, in flat order; parameters elsewhere are absent."""
        shard, starts = self.shard_span(rank), self.layout.starts
        return tuple(
            ParamSpan(index, Span(start - starts[index], stop - starts[index]), start - shard.start)
            for index, start, stop in self.layout.touched(shard)
        )

    def owner_at(self, position: int) -> int:
        """Return the rank whose shard holds the flat element ``position`` (gaps and tail included).

        Raises:
            LayoutError: ``position`` is not in the flat buffer.
        """
        if not 0 <= position < self.layout.numel:
            raise LayoutError(
                explain(
                    "ShardMap.owner_at",
                    expected=f"a position in [0, {self.layout.numel})",
                    got=str(position),
                    remedy="Positions count elements of the flat buffer without right padding",
                )
            )
        return position // self.shard_numel

    def owner_ranks(self, param_index: int) -> range:
        """Return the (consecutive) ranks that have elements of a parameter; empty for an empty parameter."""
        span = self.layout.span(param_index)
        if not span.numel:
            return range(0)
        return range(self.owner_at(span.start), self.owner_at(span.stop - 1) + 1)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                explain(
                    "ShardMap",
                    expected=f"a rank in [0, {self.world_size})",
                    got=str(rank),
                    remedy="Ranks count within the shard group",
                )
            )
