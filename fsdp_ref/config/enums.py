"""Named choices of users: enums with the member order and values of torch's FSDP.

Source: ``torch.distributed.fsdp.api`` (public names and order; re-read for torch 2.11 to 2.13).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ShardingStrategy(Enum):
    """What is sharded and when full parameters are freed.

    ``FULL_SHARD``: parameters, gradients and optimizer state are sharded; full parameters are freed after forward.
    ``SHARD_GRAD_OP``: as above, and full parameters stay from forward until after backward.
    ``NO_SHARD``: everything is replicated; gradients are averaged by an all-reduce.
    ``HYBRID_SHARD``: ``FULL_SHARD`` inside a shard group, replicated across a replicate group.
    ``_HYBRID_SHARD_ZERO2``: ``SHARD_GRAD_OP`` inside a shard group, replicated across a replicate group.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When the next unit's parameters are gathered in backward: before or after the current unit's gradients."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """Which form ``state_dict`` returns: whole tensors, this rank's flat shards, or sharded original tensors."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """How optimizer state is keyed: by parameter name or by integer parameter id."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


HYBRID_SHARDING_STRATEGIES: Final = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})
NO_RESHARD_AFTER_FORWARD_STRATEGIES: Final = frozenset(
    {ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2}
)
