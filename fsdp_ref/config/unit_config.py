"""The settings of one unit: those of the user, of a policy and of the environment, resolved.

Made once per unit by ``build.resolve``, before anything is changed, and shared by the unit and its flat parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_ref.config.enums import (
    HYBRID_SHARDING_STRATEGIES,
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    BackwardPrefetch,
    ShardingStrategy,
)
from fsdp_ref.config.policies import CPUOffload, MixedPrecision

if TYPE_CHECKING:
    import torch

    from fsdp_ref.comm.groups import DataParallelGroups


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """Settings of one unit.

    Attributes:
        strategy: the strategy that the groups allow.
        device: where the unit computes.
        groups: over which ranks it is sharded and replicated.
        mixed_precision: dtypes.
        cpu_offload: where shards live.
        backward_prefetch: when backward gathers the next unit; None for not ahead.
        forward_prefetch: gather the next unit in forward ahead of need, in the order of the first iteration.
        limit_all_gathers: bound how far the host runs ahead of the device.
        use_orig_params: users see their own parameters and not the flat one.
        output_dtype: floating-point outputs are cast to it; None leaves them.
        full_precision_module: made because mixed precision leaves its class alone: inputs are cast up, outputs back.
        applied_here: the composable API was called on this very module, so that its inputs are cast like a root's.
        full_precision_in_eval: modules in eval mode compute in full precision.
        reshards_after_forward: whether the strategy frees full parameters between forward and backward; derived.
    """

    strategy: ShardingStrategy
    device: torch.device
    groups: DataParallelGroups
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    output_dtype: torch.dtype | None = None
    full_precision_module: bool = False
    applied_here: bool = False
    full_precision_in_eval: bool = False
    reshards_after_forward: bool = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES or self.strategy is ShardingStrategy.NO_SHARD
        object.__setattr__(self, "reshards_after_forward", not keeps)

    @property
    def hybrid(self) -> bool:
        """Whether gradients are reduced over a second group."""
        return self.strategy in HYBRID_SHARDING_STRATEGIES

    @property
    def offload(self) -> bool:
        """Whether shards and their gradients live on the CPU."""
        return self.cpu_offload.offload_params
