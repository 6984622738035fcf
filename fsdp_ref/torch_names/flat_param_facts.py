"""Constants that tools read from a flat parameter, under the names of ``torch.distributed.fsdp._flat_param``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fsdp_ref.torch_names.inclusive_view import is_padding_mask, numels_with_padding, shard_param_infos

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


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
