"""Pure arithmetic of flat buffers: where parameters lie, which rank has what.

Standard library only. No tensor, no process group, no device: every statement here is property-tested without ranks.
Ranges are half-open, and all numbers count elements.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``start, start + 1, ..., stop - 1``. Empty ones are legal: a rank beyond a small parameter has one."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def as_slice(self) -> slice:
        """Return the span as an index for a flat tensor or a list."""
        return slice(self.start, self.stop)


# ---------------------------------------------------------------------- one parameter


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape`` (a dimension of size 0 counts as 1, as torch does)."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether ``stride`` walks ``shape`` in row-major order; strides of dimensions of size 1 do not matter."""
    wanted = row_major_stride(shape)
    return 0 in shape or all(size == 1 or have == want for size, have, want in zip(shape, stride, wanted, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill one gapless block of storage, each place once, in whatever order."""
    step = 1
    for have, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz != 1):
        if have != step and 0 not in shape:
            return False
        step *= size
    return True


# The parameters of a model have few shapes: what they imply is worked out once for each.
@lru_cache
def _form(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...], bool, int]:
    """Return sizes, strides, whether these are row-major, and the number of elements."""
    sizes = tuple(int(size) for size in shape)
    wanted = row_major_stride(sizes)
    steps = wanted if stride is None else tuple(int(step) for step in stride)
    # In row-major order dimensions of size 1 may carry any stride; torch's own values are kept.
    if steps != wanted and not is_dense(sizes, steps):
        steps = wanted
    return sizes, steps, is_row_major(sizes, steps), math.prod(sizes)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the layout sees it; one flat buffer has one dtype, so this says none. Made by :meth:`of`.

    Attributes:
        fqn: fully qualified name, relative to the module that the flat parameter belongs to.
        shape: sizes per dimension; ``()`` is a scalar of one element.
        stride: element strides with which the parameter is rebuilt from its flat range.
        contiguous: whether that order is row-major.
        numel: number of elements.
        aliases: further names of the same (tied) parameter, in registration order.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    numel: int
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, fqn: str, shape: Sequence[int], stride: Sequence[int] | None = None, aliases: Sequence[str] = ()
    ) -> ParamSpec:
        """Describe a tensor of ``shape`` and ``stride``.

        A dense tensor keeps its own element order (channels-last weights stay channels-last). One whose strides leave
        gaps or overlap cannot be rebuilt from as many elements as it has, so it is laid out in row-major order.
        """
        return cls(fqn, *_form(tuple(shape), None if stride is None else tuple(stride)), tuple(aliases))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the parameter, its own first."""
        return (self.fqn, *self.aliases)

    @property
    def storage_order(self) -> tuple[int, ...]:
        """Dimensions from outermost to innermost in storage: permuting by it makes the parameter row-major."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim)))


# ---------------------------------------------------------------------- all parameters of a flat buffer


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The place of each parameter in one flat buffer. Made by :meth:`build`; look-ups are bisections.

    Three parameters of shapes 7x3, 5x7 and 5x5 with ``alignment_numel=4`` (16 bytes of fp32) and
    ``pad_to_multiple=2`` (two ranks), ``g`` a gap and ``t`` the tail::

        |        a        | g |             b             | g |          c          | t |
        0                21  24                          59  60                    85  86

    Every parameter starts at a multiple of ``alignment_numel``, so that a view of it is as aligned as torch's own
    allocations; the total is a multiple of ``pad_to_multiple``. With both at 1 there is no padding at all.
    Gap and tail elements belong to no parameter, and no result may depend on them.

    Attributes:
        params: the parameters, in flattening order.
        starts: offset of each parameter.
        numel: total size with gaps and tail.
        stops: one past the last element of each parameter; derived.
        gaps: what lies between parameters and behind the last; derived.
    """

    params: tuple[ParamSpec, ...]
    starts: tuple[int, ...]
    numel: int
    stops: tuple[int, ...] = field(init=False, repr=False, compare=False)
    gaps: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def build(cls, params: Sequence[ParamSpec], *, alignment_numel: int = 1, pad_to_multiple: int = 1) -> FlatLayout:
        """Place ``params`` one after the other.

        Args:
            params: parameters in flattening order; tied ones once, with their other names as aliases.
            alignment_numel: elements that make one alignment unit in the dtype of computation; 1 for none.
            pad_to_multiple: the total is padded to a multiple of it (the number of ranks); 1 for none.
        """
        starts: list[int] = []
        end = 0
        for param in params:
            end += -end % alignment_numel
            starts.append(end)
            end += param.numel
        return cls(tuple(params), tuple(starts), end + -end % pad_to_multiple)

    def __post_init__(self) -> None:
        stops = tuple(start + param.numel for start, param in zip(self.starts, self.params))
        object.__setattr__(self, "stops", stops)
        bounds = zip((0, *stops), (*self.starts, self.numel))
        object.__setattr__(self, "gaps", tuple(Span(end, start) for end, start in bounds if start > end))

    def __len__(self) -> int:
        return len(self.params)

    def span(self, index: int) -> Span:
        """Return where parameter ``index`` lies in the flat buffer."""
        return Span(self.starts[index], self.stops[index])

    @property
    def params_numel(self) -> int:
        """Elements that belong to parameters, without gaps and tail."""
        return sum(param.numel for param in self.params)

    def touched(self, window: Span) -> Iterator[tuple[int, int, int]]:
        """Yield each parameter with elements in ``window`` as (index, start, stop), in order; counted in the flat buffer.

        Costs one bisection and the number of parameters that are touched.
        """
        for index in range(bisect_right(self.stops, window.start), len(self.params)):
            start, stop = max(self.starts[index], window.start), min(self.stops[index], window.stop)
            if self.starts[index] >= window.stop:
                return
            if start < stop:
                yield index, start, stop


# ---------------------------------------------------------------------- ranks


class ParamSpan(NamedTuple):
    """A piece of one parameter inside one shard."""

    param_index: int
    span_in_param: Span
    """Counted from the parameter's first element in storage order."""
    offset_in_shard: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The shards of one layout over ``world_size`` ranks, which count within the shard group.

    A flat buffer is cut into equal chunks, the last ones short or empty, exactly as ``torch.chunk`` cuts a flat tensor;
    each rank's chunk is then padded on the right to the common size. Ten elements over four ranks, ``.`` an element and
    ``p`` right padding::

        rank 0  [0, 3)    . . .
        rank 1  [3, 6)    . . .
        rank 2  [6, 9)    . . .
        rank 3  [9, 10)   . p p

    Everything is computed for the rank that is asked about: 100,000 parameters on 16,384 ranks cost no more than one
    rank's parameters.
    """

    layout: FlatLayout
    world_size: int

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
        """Return the rank whose shard holds the flat element ``position`` (gaps and tail included)."""
        return position // self.shard_numel

    def owner_ranks(self, param_index: int) -> range:
        """Return the (consecutive) ranks that have elements of a parameter; empty for an empty parameter."""
        span = self.layout.span(param_index)
        return range(self.owner_at(span.start), self.owner_at(span.stop - 1) + 1) if span.numel else range(0)
