"""Saving and loading optimizer state: the functions that users call.

Source for names, argument order and defaults: ``torch.distributed.fsdp.FullyShardedDataParallel`` (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_ref.annotations import units_in
from fsdp_ref.checkpoint.optim_index import ModelIndex, refuse_in_no_sync
from fsdp_ref.checkpoint.optim_load import Source, load_optim_state
from fsdp_ref.checkpoint.optim_save import save_optim_state
from fsdp_ref.checkpoint.settings import get_state_dict_type
from fsdp_ref.config import FullOptimStateDictConfig, StateDictSettings, StateDictType
from fsdp_ref.fence.optimizers import guard

State = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: State | None = None, group: dist.ProcessGroup | None = None
) -> State:
    """Return the optimizer's state by the names of the plain module, in the form of the model's state-dict type.

    Args:
        model: The sharded model, or a plain module around sharded ones.
        optim: Its optimizer.
        optim_state_dict: The result of ``optim.state_dict()``, if you want to change it first. Default: called here.
        group: The ranks of the model; needed only without units.

    See ``optim_save.save_optim_state`` for what is returned, errors and collectives.
    """
    return save_optim_state(ModelIndex.of(model, group), optim, optim_state_dict, _settings(model))


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Return what this rank's ``optim.load_state_dict`` takes, made from state by name.

    Args:
        model: The sharded model, or a plain module around sharded ones; it may be sharded differently than when it was saved.
        optim: Its optimizer.
        optim_state_dict: State by name in the form of the model's state-dict type. With ``rank0_only`` rank 0's state is
            used, and other ranks may pass anything.
        is_named_optimizer: The optimizer's own state dict is keyed by the names of ``model.named_parameters()``.
        load_directly: Load it, too.
        group: The ranks of the model; needed only without units.

    See ``optim_load.load_optim_state`` for what is returned, errors and collectives.
    """
    guard(optim)
    refuse_in_no_sync(model)
    settings = _settings(model)
    config = settings.optim_state_dict_config
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        source = Source.SHARDS
    else:
        rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        source = Source.FIRST_RANK if rank0_only else Source.EVERY_RANK
    index = ModelIndex.of(model, group)
    tensors = [group["params"] for group in optim.param_groups]
    loaded = load_optim_state(index, tensors, optim, optim_state_dict, source, named=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(loaded)
    return loaded


def _settings(model: nn.Module) -> StateDictSettings:
    return get_state_dict_type(model) if units_in(model) else StateDictSettings()
