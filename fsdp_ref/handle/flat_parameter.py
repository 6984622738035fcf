"""How does one know a flat parameter among other parameters?

By a mark. Its type is ``nn.Parameter``, because optimizers choose their fast paths by exact type; ``isinstance(p,
FlatParameter)`` looks for the mark. State lives in the handle; the few attributes on the tensor are constants that
tools read (their names follow ``torch.distributed.fsdp._flat_param``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.layout import ShardMap
from fsdp_ref.layout.inclusive_view import is_padding_mask, numels_with_padding, shard_param_infos

_MARK = "_is_flat_param"


class _ByMark(type(nn.Parameter)):  # type: ignore[misc]  # the metaclass of Parameter has no public name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and getattr(instance, _MARK, False)


class FlatParameter(nn.Parameter, metaclass=_ByMark):
    """All parameters of one unit as one flat tensor; see the module's text for what its objects really are."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        """Return a marked ``nn.Parameter`` over ``data``."""
        flat: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad=requires_grad)
        setattr(flat, _MARK, True)
        return flat  # an nn.Parameter by type, a FlatParameter by mark


def describe(flat: nn.Parameter, shard_map: ShardMap, rank: int, full_F: Tensor) -> None:
    """Put the constants that tools read from flat parameters on one; ``full_F`` is its (freed) full buffer."""
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
        "_full_param_padded": full_F,
    }
    for name, value in facts.items():
        setattr(flat, name, value)


def like_flat(copied: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give a copy of a flat parameter the marks and constants of the original."""
    for name, value in vars(original).items():
        setattr(copied, name, value)
    return copied
