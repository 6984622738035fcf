"""The names under which tools and tests read a unit's settings from its wrapper: those of torch's class; read only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref.annotations import unit_of
from fsdp_ref.checkpoint import optim_state, settings
from fsdp_ref.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.states import TrainingState
from fsdp_ref.torch_names import older_optim_state


def _setting(read: Callable[[Any], Any], doc: str) -> Any:
    return property(lambda self: read(unit_of(self)), doc=doc)


class UnitAttributes:
    """Mixin with one property per attribute of torch's wrapper that others read."""

    rank: int = _setting(lambda unit: unit.config.groups.rank, "Rank in the shard group.")
    world_size: int = _setting(lambda unit: unit.config.groups.shard_size, "Size of the shard group.")
    process_group: dist.ProcessGroup = _setting(lambda unit: unit.config.groups.shard, "The shard group.")
    _inter_node_pg: dist.ProcessGroup | None = _setting(
        lambda unit: unit.config.groups.replicate, "The replicate group."
    )
    compute_device: torch.device = _setting(lambda unit: unit.config.device, "Where the unit computes.")
    sharding_strategy: ShardingStrategy = _setting(lambda unit: unit.config.strategy, "The effective strategy.")
    mixed_precision: MixedPrecision = _setting(lambda unit: unit.config.mixed_precision, "Dtypes.")
    cpu_offload: CPUOffload = _setting(lambda unit: unit.config.cpu_offload, "Where shards live.")
    backward_prefetch: BackwardPrefetch | None = _setting(lambda unit: unit.config.backward_prefetch, "See the class.")
    forward_prefetch: bool = _setting(lambda unit: unit.config.forward_prefetch, "See the class.")
    limit_all_gathers: bool = _setting(lambda unit: unit.config.limit_all_gathers, "See the class.")
    training_state: TrainingState = _setting(lambda unit: unit.training_state, "What the unit is busy with.")
    params: list[nn.Parameter] = _setting(
        lambda unit: [] if unit.handle.empty else [unit.handle.flat_param], "The flat parameter, as a list."
    )
    _handle: FlatHandle | None = _setting(
        lambda unit: None if unit.handle.empty else unit.handle, "The flat parameter's handle."
    )
    _handles: list[FlatHandle] = _setting(lambda unit: [] if unit.handle.empty else [unit.handle], "Older form.")
    _flat_param: nn.Parameter | None = _setting(
        lambda unit: None if unit.handle.empty else unit.handle.flat_param, "The flat parameter."
    )
    _is_root: bool | None = _setting(lambda unit: unit.is_root, "Whether the unit is the root; None before first use.")
    _use_orig_params: bool = _setting(lambda unit: unit.config.use_orig_params, "See the class.")
    _comm_hook: Callable[..., Any] | None = _setting(lambda unit: unit.comm_hook, "The registered hook.")
    _comm_hook_state: Any = _setting(lambda unit: unit.comm_hook_state, "The registered hook's state.")
    _sync_gradients: bool = _setting(lambda unit: unit.sync_gradients, "Whether backward reduces.")
    _state_dict_type: StateDictType = _setting(
        lambda unit: unit.state_dict_settings.state_dict_type, "Form of its state."
    )
    _state_dict_config: StateDictConfig = _setting(
        lambda unit: unit.state_dict_settings.state_dict_config, "Options of that form."
    )
    _optim_state_dict_config: OptimStateDictConfig = _setting(
        lambda unit: unit.state_dict_settings.optim_state_dict_config, "The same for the optimizer's state."
    )
    _ignored_modules: Any = _setting(lambda unit: set(unit.ignored.modules), "Modules left alone.")
    _ignored_params: Any = _setting(lambda unit: set(unit.ignored.params), "Parameters left alone.")

    set_state_dict_type = staticmethod(settings.set_state_dict_type)
    get_state_dict_type = staticmethod(settings.get_state_dict_type)
    state_dict_type = staticmethod(settings.state_dict_type)
    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(older_optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(older_optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(older_optim_state.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(older_optim_state.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(older_optim_state.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(older_optim_state.rekey_optim_state_dict)
