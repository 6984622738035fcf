"""Tells all ranks which parameters no rank used, without an extra message.

[Note: marks of use] By the sign of a zero. In IEEE arithmetic adding -0.0 changes nothing, and a sum is -0.0 only where
all summands are. A rank without a gradient for a parameter sends -0.0 in the parameter's first element of each shard; a
rank with one sends no -0.0 there. The reduced element is -0.0 exactly where no rank used the parameter. Sums over shards,
replicas and micro-batches keep that, and no byte is added to what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_ref.layout import ShardMap
from fsdp_ref.storage.memory import upload


def _firsts(shard_map: ShardMap) -> tuple[Tensor, Tensor]:
    """Return the first element of each parameter in each shard, in flat order, and whose it is; on the host.

    A shard begins in the gathered buffer where it begins in the flat one. With many ranks there are many: no loop over them.
    """
    layout = shard_map.layout
    spans = [(index, layout.span(index)) for index, spec in enumerate(layout.params) if spec.numel]
    starts = torch.tensor([span.start for _, span in spans], dtype=torch.int64)
    stops = torch.tensor([span.stop for _, span in spans], dtype=torch.int64)
    indices = torch.tensor([index for index, _ in spans], dtype=torch.int64)
    cuts = torch.arange(shard_map.world_size, dtype=torch.int64) * shard_map.shard_numel
    inside = torch.searchsorted(starts, cuts, right=True) - 1
    holder = inside.clamp(min=0)
    cut_through = (inside >= 0) & (starts[holder] < cuts) & (cuts < stops[holder]) if spans else cuts < 0
    # A parameter has one mark where it begins and one in each further shard that it reaches into, so every holder learns.
    places = torch.cat([starts, cuts[cut_through]])
    owners = torch.cat([indices, indices[holder[cut_through]]])
    places, order = places.sort()
    return places, owners[order]


class UsageMarks:
    """The marked elements of one flat parameter: of the full one, and of this rank's shard.

    Attributes:
        owners: which parameter each marked element of the full one belongs to.
        my_owners: the same for the shard.
    """

    def __init__(self, shard_map: ShardMap, rank: int, device: torch.device) -> None:
        # The same on all ranks: a mark that one rank writes is read at the same element by the owner of its shard.
        places, owners = _firsts(shard_map)
        mine = shard_map.param_spans(rank)
        self.owners: list[int] = owners.tolist()
        self.my_owners = [piece.param_index for piece in mine]
        self._places = places.to(device)
        self._mine = torch.tensor([piece.offset_in_shard for piece in mine], dtype=torch.int64).to(device)
        # The latest masks of unused marks: which parameters are used hardly ever changes.
        self._masks: dict[bool, tuple[tuple[bool, ...], Tensor]] = {}

    def stamp(self, flat: Tensor, used: Sequence[bool], *, shard: bool = False) -> None:
        """Mark in ``flat`` which parameters have a gradient; after casts and divisions, which may underflow to -0.0."""
        places, owners = (self._mine, self.my_owners) if shard else (self._places, self.owners)
        marks = flat.index_select(0, places).add_(0.0)  # -0.0 + 0.0 is 0.0: a gradient that is -0.0 is no mark
        # Seldom: most steps use every parameter, and then no mask is made or sent to the device.
        if not all(used):
            marks.masked_fill_(self._mask(used, owners, flat.device, shard=shard), -0.0)
        flat.index_copy_(0, places, marks)

    def _mask(self, used: Sequence[bool], owners: Sequence[int], device: torch.device, *, shard: bool) -> Tensor:
        key = tuple(used)
        latest, mask = self._masks.get(shard, ((), None))
        if mask is None or latest != key:
            mask = upload([not used[owner] for owner in owners], torch.bool, device)
            # The latest alone: another set of used parameters seldom comes back.
            self._masks[shard] = key, mask
        return mask

    def unused(self, flat: Tensor, *, shard: bool = False) -> Tensor:
        """Return which marked elements say that no rank has a gradient; on the device, so that the host does not wait."""
        marks = flat.index_select(0, self._mine if shard else self._places)
        # The sign alone is not enough: a gradient may be negative.
        return marks.signbit().logical_and_(marks == 0)
