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


def _setting(read: Callable[[Any], Any]) -> Any:
    return property(lambda self: read(unit_of(self)))


class UnitAttributes:
    """Mixin with one property per attribute of torch's wrapper that others read, each with torch's meaning."""

    rank: int = _setting(lambda unit: unit.config.groups.rank)
    world_size: int = _setting(lambda unit: unit.config.groups.shard_size)
    process_group: dist.ProcessGroup = _setting(lambda unit: unit.config.groups.shard)
    _inter_node_pg: dist.ProcessGroup | None = _setting(lambda unit: unit.config.groups.replicate)
    compute_device: torch.device = _setting(lambda unit: unit.config.device)
    sharding_strategy: ShardingStrategy = _setting(lambda unit: unit.config.strategy)
    mixed_precision: MixedPrecision = _setting(lambda unit: unit.config.mixed_precision)
    cpu_offload: CPUOffload = _setting(lambda unit: unit.config.cpu_offload)
    backward_prefetch: BackwardPrefetch | None = _setting(lambda unit: unit.config.backward_prefetch)
    forward_prefetch: bool = _setting(lambda unit: unit.config.forward_prefetch)
    limit_all_gathers: bool = _setting(lambda unit: unit.config.limit_all_gathers)
    training_state: TrainingState = _setting(lambda unit: unit.training_state)
    params: list[nn.Parameter] = _setting(lambda unit: [] if unit.handle.empty else [unit.handle.flat_param])
    _handle: FlatHandle | None = _setting(lambda unit: None if unit.handle.empty else unit.handle)
    _handles: list[FlatHandle] = _setting(lambda unit: [] if unit.handle.empty else [unit.handle])
    _flat_param: nn.Parameter | None = _setting(lambda unit: None if unit.handle.empty else unit.handle.flat_param)
    _is_root: bool | None = _setting(lambda unit: unit.is_root)
    _use_orig_params: bool = _setting(lambda unit: unit.config.use_orig_params)
    _comm_hook: Callable[..., Any] | None = _setting(lambda unit: unit.comm_hook)
    _comm_hook_state: Any = _setting(lambda unit: unit.comm_hook_state)
    _sync_gradients: bool = _setting(lambda unit: unit.sync_gradients)
    _state_dict_type: StateDictType = _setting(lambda unit: unit.state_dict_settings.state_dict_type)
    _state_dict_config: StateDictConfig = _setting(lambda unit: unit.state_dict_settings.state_dict_config)
    _optim_state_dict_config: OptimStateDictConfig = _setting(
        lambda unit: unit.state_dict_settings.optim_state_dict_config
    )
    _ignored_modules: Any = _setting(lambda unit: set(unit.ignored.modules))
    _ignored_params: Any = _setting(lambda unit: set(unit.ignored.params))

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
