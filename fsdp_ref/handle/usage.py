"""How do all ranks learn which parameters no rank used, without a message of its own?

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


class UsageMarks:
    """The marked elements of one flat parameter: of the full one, and of this rank's shard.

    Attributes:
        owners: which parameter each marked element of the full one belongs to.
        my_owners: the same for the shard.
    """

    def __init__(self, shard_map: ShardMap, rank: int, device: torch.device) -> None:
        pieces = [(each, piece) for each in range(shard_map.world_size) for piece in shard_map.param_spans(each)]
        self.owners = [piece.param_index for _, piece in pieces]
        self.my_owners = [piece.param_index for each, piece in pieces if each == rank]
        places = [each * shard_map.shard_numel + piece.offset_in_shard for each, piece in pieces]
        mine = [piece.offset_in_shard for each, piece in pieces if each == rank]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._mine = torch.tensor(mine, dtype=torch.int64, device=device)

    def stamp(self, flat: Tensor, used: Sequence[bool], *, shard: bool = False) -> None:
        """Mark in ``flat`` which parameters have a gradient; after casts and divisions, which may underflow to -0.0."""
        places, owners = (self._mine, self.my_owners) if shard else (self._places, self.owners)
        marks = flat.index_select(0, places).add_(0.0)
        if not all(used):
            unused = torch.tensor([not used[owner] for owner in owners], dtype=torch.bool, device=flat.device)
            marks.masked_fill_(unused, -0.0)
        flat.index_copy_(0, places, marks)

    def unused(self, flat: Tensor, *, shard: bool = False) -> Tensor:
        """Return which marked elements say that no rank has a gradient; on the device, so that nobody waits for it."""
        marks = flat.index_select(0, self._mine if shard else self._places)
        return marks.signbit().logical_and_(marks == 0)
