"""What does a rank have of each original parameter inside torch FSDP1's flat parameters?

Read from the flat parameters' metadata. torch offers no public way to this; the attributes used, which torch 2.11 to
2.15 share, are listed in `_flat_unit` and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_testing.adapters.shared import naming
from fsdp_testing.adapters.shared.flat_pieces import FlatOriginal, FlatUnit


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """Yield every flat parameter as it is on this rank now."""
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield _flat_unit(naming.original(name), unit._handle)


def _flat_unit(prefix: str, handle: Any) -> FlatUnit:
    flat: Any = handle.flat_param
    local = getattr(flat, "_local_shard", None)  # absent before lazy initialisation, when the data is the shard
    shard = (flat.data if local is None else local).detach()
    return FlatUnit(
        parameter=flat,
        originals=tuple(_originals(prefix, flat, by_original=bool(handle._use_orig_params))),
        shard_S=shard,
        unsharded_grad=flat.grad is not None and flat.grad.numel() != shard.numel(),
        reduced_S=getattr(flat, "_saved_grad_shard", None),
    )


def _originals(prefix: str, flat: Any, *, by_original: bool) -> Iterator[FlatOriginal]:
    starts = itertools.accumulate(flat._numels_with_padding, initial=0)
    real = [start for start, padding in zip(starts, flat._is_padding_mask) if not padding]
    objects = flat._params if by_original and flat._params is not None else [None] * len(flat._fqns)
    rows = zip(flat._fqns, flat._shapes, flat._strides, flat._contiguities, objects, real, flat._shard_param_infos)
    for fqn, shape, stride, contiguous, parameter, start, info in rows:
        whole_name = ".".join(part for part in (prefix, naming.original(fqn)) if part)
        span = (info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard)
        place = span if info.in_shard else (None, 0, 0)
        yield FlatOriginal(whole_name, tuple(shape), tuple(stride), bool(contiguous), parameter, start, *place)
