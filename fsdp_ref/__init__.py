"""Reference implementation of fully sharded data parallel (flat-parameter FSDP).

``from fsdp_ref import FullyShardedDataParallel as FSDP`` replaces the import of torch's class; the modules ``wrap``,
``composable``, ``comm_hooks`` and ``flat_param`` have torch's names under the same or similar module names.

Importing the package is cheap: each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_ref.api.arguments import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from fsdp_ref.api.fully_shard import fully_shard
    from fsdp_ref.api.trees import no_sync, register_comm_hook, register_fsdp_forward_method, unshard_params
    from fsdp_ref.api.wrapper import FullyShardedDataParallel
    from fsdp_ref.checkpoint.optim_state import optim_state_dict, optim_state_dict_to_load
    from fsdp_ref.checkpoint.settings import get_state_dict_type, set_state_dict_type, state_dict_type
    from fsdp_ref.config import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from fsdp_ref.handle.marked_parameter import FlatParameter
    from fsdp_ref.storage.extension import ParameterExtension, register_parameter_extension
    from fsdp_ref.training.clip import clip_grad_norm_
    from fsdp_ref.training.uneven_inputs import UnevenInputs

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ParameterExtension",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnevenInputs",
    "clip_grad_norm_",
    "fully_shard",
    "get_state_dict_type",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "register_parameter_extension",
    "set_state_dict_type",
    "state_dict_type",
    "unshard_params",
]

_HOMES = {
    "config": "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
    "LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig "
    "ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings StateDictType",
    "api.arguments": "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy",
    "handle.marked_parameter": "FlatParameter",
    "api.wrapper": "FullyShardedDataParallel",
    "storage.extension": "ParameterExtension register_parameter_extension",
    "training.clip": "clip_grad_norm_",
    "training.uneven_inputs": "UnevenInputs",
    "api.trees": "no_sync register_comm_hook register_fsdp_forward_method unshard_params",
    "api.fully_shard": "fully_shard",
    "checkpoint.settings": "get_state_dict_type set_state_dict_type state_dict_type",
    "checkpoint.optim_state": "optim_state_dict optim_state_dict_to_load",
}


if not TYPE_CHECKING:  # to a type checker the names above are all that there are

    def __getattr__(name: str) -> object:
        """Import a public name from its module when it is first used."""
        home = next((home for home, names in _HOMES.items() if name in names.split()), None)
        if home is None:
            raise AttributeError(f"module 'fsdp_ref' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"fsdp_ref.{home}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
