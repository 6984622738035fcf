"""The composable APIs under one name: ``from fsdp_ref.composable import fully_shard, replicate, contract``."""

from fsdp_ref.api.contract import _get_registry, contract
from fsdp_ref.api.fully_shard import fully_shard
from fsdp_ref.api.replicate import replicate
from fsdp_ref.api.trees import no_sync, register_comm_hook, register_fsdp_forward_method, unshard_params
from fsdp_ref.checkpoint.optim_state import optim_state_dict, optim_state_dict_to_load
from fsdp_ref.checkpoint.settings import get_state_dict_type, set_state_dict_type, state_dict_type
from fsdp_ref.torch_names.older_optim_state import rekey_optim_state_dict
from fsdp_ref.training.clip import clip_grad_norm_

__all__ = [
    "_get_registry",
    "clip_grad_norm_",
    "contract",
    "fully_shard",
    "get_state_dict_type",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "rekey_optim_state_dict",
    "replicate",
    "set_state_dict_type",
    "state_dict_type",
    "unshard_params",
]
