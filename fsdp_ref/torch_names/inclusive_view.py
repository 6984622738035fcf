"""Our half-open spans as FSDP1's metadata tuples, whose ends are inclusive.

A thin translation for tests and tools that know torch's names (``_shard_param_infos``, ``shard_metadata()``,
``_numels_with_padding``). Nothing in the package computes with these tuples.
Source: ``torch.distributed.fsdp._flat_param`` (names and meaning of the fields).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fsdp_ref.layout import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.layout import FlatLayout, ShardMap


class ShardParamInfo(NamedTuple):
    """One parameter on one rank; all but the first field are None when the rank has none of it."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None
    """Inclusive."""


ABSENT = ShardParamInfo(False, None, None, None, None)


class FlatParamShardMetadata(NamedTuple):
    """The parameters present in one shard; ``param_offsets`` are inclusive (first, last) element numbers."""

    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


def infos_between(layout: FlatLayout, start: int, last: int) -> tuple[ShardParamInfo, ...]:
    """Return one info per parameter for the flat elements ``start`` to ``last`` inclusive.

    A ``last`` beyond the end is clipped; ``last < start`` is an empty range.
    """
    infos = [ABSENT] * len(layout)
    for index, first, stop in layout.touched(Span(start, max(start, last + 1))):
        origin = layout.starts[index]
        infos[index] = ShardParamInfo(True, first - start, stop - first, first - origin, stop - 1 - origin)
    return tuple(infos)


def shard_param_infos(shard_map: ShardMap, rank: int) -> tuple[ShardParamInfo, ...]:
    """Return one info per parameter of the layout for ``rank``'s shard."""
    shard = shard_map.shard_span(rank)
    return infos_between(shard_map.layout, shard.start, shard.stop - 1)


def shard_metadata(shard_map: ShardMap, rank: int) -> FlatParamShardMetadata:
    """Return FSDP1's description of the parameters of which ``rank`` has a piece."""
    params = shard_map.layout.params
    pieces = shard_map.param_spans(rank)
    present = [params[piece.param_index] for piece in pieces]
    return FlatParamShardMetadata(
        tuple(param.fqn for param in present),
        tuple(param.shape for param in present),
        tuple(param.stride for param in present),
        tuple(param.contiguous for param in present),
        tuple(param.numel for param in present),
        tuple((piece.span_in_param.start, piece.span_in_param.stop - 1) for piece in pieces),
    )


def numels_with_padding(layout: FlatLayout) -> tuple[int, ...]:
    """Return the sizes of parameters, gaps and tail in buffer order."""
    return tuple(numel for _, numel in segments(layout))


def is_padding_mask(layout: FlatLayout) -> tuple[bool, ...]:
    """Return, for each entry of :func:`numels_with_padding`, whether it is a gap or the tail."""
    return tuple(index is None for index, _ in segments(layout))


def segments(layout: FlatLayout) -> Iterator[tuple[int | None, int]]:
    """Yield the whole buffer in order as (parameter index, elements), with None for each gap and for the tail."""
    end = 0
    for index, (start, stop) in enumerate(zip(layout.starts, layout.stops)):
        if start > end:
            yield None, start - end
        yield index, stop - start
        end = stop
    if layout.numel > end:
        yield None, layout.numel - end


def describe(handle: FlatHandle) -> None:
    """Put the constants that tools read on a flat parameter; ``_full_param_padded`` is its full buffer, freed or not."""
    shard_map, rank = handle.shard_map, handle.shard_rank
    layout = shard_map.layout
    facts: dict[str, Any] = {
        "_fqns": tuple(spec.fqn for spec in layout.params),
        "_shapes": tuple(torch.Size(spec.shape) for spec in layout.params),
        "_strides": tuple(spec.stride for spec in layout.params),
        "_contiguities": tuple(spec.contiguous for spec in layout.params),
        "_numels": tuple(spec.numel for spec in layout.params),
        "_numels_with_padding": numels_with_padding(layout),
        "_is_padding_mask": is_padding_mask(layout),
        "_num_params": len(layout),
        "_shard_param_infos": shard_param_infos(shard_map, rank),
        "_unpadded_unsharded_size": torch.Size([layout.numel]),
        "_padded_unsharded_size": torch.Size([shard_map.padded_numel]),
        "_sharded_size": torch.Size([shard_map.shard_numel]),
        "_shard_numel_padded": shard_map.padding(rank),
        "_full_param_padded": handle.full_F(),
    }
    for name, value in facts.items():
        setattr(handle.flat_param, name, value)
