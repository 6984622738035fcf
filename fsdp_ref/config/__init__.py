"""Settings of the reference: enums and frozen option objects, ours and (by name) torch's.

Public names mirror torch's FSDP; ``coerce_*`` turns either library's object into ours.
"""

from fsdp_ref.config.coerce import (
    coerce_backward_prefetch,
    coerce_config,
    coerce_cpu_offload,
    coerce_enum,
    coerce_mixed_precision,
    coerce_sharding_strategy,
)
from fsdp_ref.config.enums import (
    HYBRID_SHARDING_STRATEGIES,
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    BackwardPrefetch,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from fsdp_ref.config.policies import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
)
from fsdp_ref.config.unit_config import UnitConfig

__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES",
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnitConfig",
    "coerce_backward_prefetch",
    "coerce_config",
    "coerce_cpu_offload",
    "coerce_enum",
    "coerce_mixed_precision",
    "coerce_sharding_strategy",
]
