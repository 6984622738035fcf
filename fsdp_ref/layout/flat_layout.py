"""The place of each parameter in the flat buffer.

The one place of alignment gaps and tail padding. Building is O(parameters), look-ups are bisections; nothing here
knows about ranks (see ``shard_map``), tensors, devices or processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_ref.errors import LayoutError, explain, listing
from fsdp_ref.layout.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fsdp_ref.layout.param_spec import ParamSpec


def padding_to(numel: int, multiple: int) -> int:
    """Return how many elements bring ``numel`` up to the next multiple."""
    return -numel % multiple


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Offsets of all parameters of one flat buffer, in elements.

    Three parameters of shapes 7x3, 5x7 and 5x5 with ``alignment_numel=4`` (16 bytes of fp32) and
    ``pad_to_multiple=2`` (two ranks), half-open spans below, ``g`` a gap and ``t`` the tail::

        |        a        | g |             b             | g |          c          | t |
        0                21  24                          59  60                    85  86

    Every parameter starts at a multiple of ``alignment_numel``, so that a view of it is as aligned as torch's own
    allocations; the total is a multiple of ``pad_to_multiple``. With both at 1 there is no padding at all.
    Gap and tail elements belong to no parameter, and no result may depend on them.

    Attributes:
        params: the parameters, in flattening order.
        starts: offset of each parameter.
        numel: total size with gaps and tail.
        alignment_numel: every start is a multiple of it.
        pad_to_multiple: the total is a multiple of it.
        stops: one past the last element of each parameter; derived.
        gaps: what lies between parameters and behind the last; derived.
    """

    params: tuple[ParamSpec, ...]
    starts: tuple[int, ...]
    numel: int
    alignment_numel: int = 1
    pad_to_multiple: int = 1
    stops: tuple[int, ...] = field(init=False, repr=False, compare=False)
    gaps: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def build(cls, params: Sequence[ParamSpec], *, alignment_numel: int = 1, pad_to_multiple: int = 1) -> FlatLayout:
        """Place ``params`` one after the other.

        Args:
            params: parameters in flattening order; tied ones once, with their other names as aliases.
            alignment_numel: elements that make one alignment unit in the dtype of computation; 1 for none.
            pad_to_multiple: the total is padded to a multiple of it (the number of ranks); 1 for none.

        Raises:
            LayoutError: a unit below 1, or two parameters with one name.
        """
        bad = [
            f"{name}={value}"
            for name, value in (("alignment_numel", alignment_numel), ("pad_to_multiple", pad_to_multiple))
            if value < 1
        ]
        if bad:
            raise LayoutError(
                explain("FlatLayout.build", expected="units of at least 1", got=listing(bad), remedy="Pass 1 for none")
            )
        starts: list[int] = []
        end = 0
        for param in params:
            end += padding_to(end, alignment_numel)
            starts.append(end)
            end += param.numel
        end += padding_to(end, pad_to_multiple)
        return cls(tuple(params), tuple(starts), end, alignment_numel, pad_to_multiple)

    def __post_init__(self) -> None:
        """Derive the ends, then prove the layout, whoever made it."""
        ends = tuple(start + param.numel for start, param in zip(self.starts, self.params))
        object.__setattr__(self, "stops", ends)
        problems = list(self._disproofs())
        if problems:
            raise LayoutError(
                explain(
                    "FlatLayout",
                    expected="aligned, ordered, disjoint parameters with minimal padding and distinct names",
                    got=listing(problems),
                    remedy="Build it with FlatLayout.build(...)",
                )
            )
        bounds = zip((0, *self.stops), (*self.starts, self.numel))
        object.__setattr__(self, "gaps", tuple(Span(end, start) for end, start in bounds if start > end))

    def _disproofs(self) -> Iterator[str]:
        if len(self.starts) != len(self.params):
            yield f"{len(self.starts)} offsets for {len(self.params)} parameters"
            return
        names = Counter(name for param in self.params for name in param.names)
        yield from (f"name {name!r} given {count} times" for name, count in names.items() if count > 1)
        end = 0
        for param, start, stop in zip(self.params, self.starts, self.stops):
            if start != end + padding_to(end, self.alignment_numel):
                yield f"{param.fqn!r} at {start} after an end at {end} with alignment {self.alignment_numel}"
            end = stop
        if self.numel != end + padding_to(end, self.pad_to_multiple):
            yield f"total {self.numel} for an end at {end} and multiples of {self.pad_to_multiple}"

    def __len__(self) -> int:
        return len(self.params)

    def span(self, index: int) -> Span:
        """Return where parameter ``index`` lies in the flat buffer."""
        return Span(self.starts[index], self.stops[index])

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each parameter lies, in order."""
        return tuple(map(Span, self.starts, self.stops))

    @property
    def params_numel(self) -> int:
        """Elements that belong to parameters, without gaps and tail."""
        return sum(param.numel for param in self.params)

    def touched(self, window: Span) -> Iterator[tuple[int, int, int]]:
        """Yield each parameter with elements in ``window`` as (index, start, stop), in order; counted in the flat buffer.

        Costs one bisection and the number of parameters that are touched.
        """
        for index in range(bisect_right(self.stops, window.start), len(self.params)):
            start, stop = self.starts[index], self.stops[index]
            if start >= window.stop:
                return
            start, stop = max(start, window.start), min(stop, window.stop)
            if start < stop:
                yield index, start, stop
