"""Which elements go from where to where when a sharded buffer takes another form?

Another world size, another parameter order, another alignment, or only some of the parameters: the plan between two
shard maps is a list of copies per rank, found by parameter name. Padding is never copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_ref.errors import LayoutError, explain, listing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsdp_ref.layout.flat_layout import FlatLayout
    from fsdp_ref.layout.shard_map import ShardMap


@dataclass(frozen=True, slots=True)
class Copy:
    """``numel`` consecutive elements of one parameter, from a source shard to a target shard.

    ``source_offset`` and ``target_offset`` count elements within the shards; ``fqn`` is the target's name for it.
    """

    fqn: str
    source_rank: int
    source_offset: int
    target_rank: int
    target_offset: int
    numel: int


def _positions(layout: FlatLayout) -> dict[str, int]:
    return {name: index for index, param in enumerate(layout.params) for name in param.names}


@dataclass(frozen=True, slots=True)
class Remap:
    """The copies that turn shards of ``source`` into shards of ``target``.

    Parameters are matched by any of their names, so that a parameter may be tied on one side under another first
    name. With ``partial=True`` parameters that exist on one side alone are left out; this is how one side's several
    flat buffers are mapped onto the other's, pair by pair.

    Cost: one dictionary per side at construction, then only the pieces of the rank that is asked about.

    Raises:
        LayoutError: a parameter is missing on one side (unless ``partial``), or differs in shape or element order.
    """

    source: ShardMap
    target: ShardMap
    partial: bool = False
    _to_source: dict[int, int] = field(init=False, repr=False, compare=False)
    _to_target: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Match the parameters of both sides and list everything that does not fit."""
        names = _positions(self.source.layout)
        pairs: dict[int, int] = {}
        missing: list[str] = []
        for index, param in enumerate(self.target.layout.params):
            found = next((names[name] for name in param.names if name in names), None)
            if found is None:
                missing.append(f"{param.fqn} (source)")
            else:
                pairs[index] = found
        back = {found: index for index, found in pairs.items()}
        lost = [p.fqn for i, p in enumerate(self.source.layout.params) if i not in back]
        missing += [f"{fqn} (target)" for fqn in lost]
        problems = list(self._misfits(pairs))
        if len(back) != len(pairs):
            problems.append("two target parameters that are one in the source")
        if missing and not self.partial:
            problems.append(f"missing {listing(missing)}")
        if problems:
            raise LayoutError(
                explain(
                    "Remap",
                    expected="the same parameters, shapes and element orders on both sides",
                    got=listing(problems),
                    remedy="Map between layouts of one model; pass partial=True to leave out what only one side has",
                )
            )
        object.__setattr__(self, "_to_source", pairs)
        object.__setattr__(self, "_to_target", back)

    def _misfits(self, pairs: dict[int, int]) -> Iterator[str]:
        for index, found in pairs.items():
            mine, theirs = self.target.layout.params[index], self.source.layout.params[found]
            if mine.shape != theirs.shape:
                yield f"{mine.fqn} of shape {theirs.shape} in the source and {mine.shape} in the target"
            elif mine.storage_order != theirs.storage_order and not (mine.contiguous and theirs.contiguous):
                yield f"{mine.fqn} with strides {theirs.stride} in the source and {mine.stride} in the target"

    def receives(self, rank: int) -> Iterator[Copy]:
        """Yield the copies into target rank ``rank``, in the order of its shard."""
        for index, piece, offset in self.target.param_spans(rank):
            if index not in self._to_source:
                continue
            fqn = self.target.layout.params[index].fqn
            for owner in self.source.owners(self._to_source[index], piece):
                yield Copy(
                    fqn,
                    owner.rank,
                    owner.offset_in_shard,
                    rank,
                    offset + owner.span_in_param.start - piece.start,
                    owner.span_in_param.numel,
                )

    def sends(self, rank: int) -> Iterator[Copy]:
        """Yield the copies out of source rank ``rank``, in the order of its shard."""
        for index, piece, offset in self.source.param_spans(rank):
            if index not in self._to_target:
                continue
            target_index = self._to_target[index]
            fqn = self.target.layout.params[target_index].fqn
            for owner in self.target.owners(target_index, piece):
                yield Copy(
                    fqn,
                    rank,
                    offset + owner.span_in_param.start - piece.start,
                    owner.rank,
                    owner.offset_in_shard,
                    owner.span_in_param.numel,
                )

    def inverse(self) -> Remap:
        """Return the plan of the way back; composed with this one it moves every parameter element onto itself."""
        return Remap(self.target, self.source, self.partial)
