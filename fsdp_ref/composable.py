"""The composable APIs under one name: ``from fsdp_ref.composable import fully_shard, replicate, contract``."""

from fsdp_ref.api.fully_shard import fully_shard, unshard_params
from fsdp_ref.api.replicate import replicate
from fsdp_ref.build.contract import _get_registry, contract

__all__ = ["_get_registry", "contract", "fully_shard", "replicate", "unshard_params"]
