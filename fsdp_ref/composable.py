"""The composable APIs under one name: ``from fsdp_ref.composable import fully_shard, replicate, contract``."""

from fsdp_ref.api.fully_shard import fully_shard
from fsdp_ref.api.replicate import replicate
from fsdp_ref.api.trees import (
    clip_grad_norm_,
    no_sync,
    register_comm_hook,
    register_fsdp_forward_method,
    unshard_params,
)
from fsdp_ref.build.contract import _get_registry, contract

__all__ = [
    "_get_registry",
    "clip_grad_norm_",
    "contract",
    "fully_shard",
    "no_sync",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "replicate",
    "unshard_params",
]
