"""Saves and loads state, and divides gradients, as all of torch's implementations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""As torch documents, other ranks then get nothing."""
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_state_dict(model: nn.Module, options: StateDictOptions = FULL) -> Mapping[str, torch.Tensor]:
    """Complete tensors on every rank. Collectives: gathers over the model's groups; every rank calls."""
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], options: StateDictOptions = FULL) -> None:
    """Every rank takes its part of the complete tensors, which it passes or rank 0 broadcasts."""
    set_model_state_dict(model, _passed(state, options), options=options)


def _passed(state: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    return {} if options.broadcast_from_rank0 and dist.get_rank() > 0 else dict(state)


def sharded_state_dict(model: nn.Module) -> Mapping[str, Any]:
    """Return this rank's shards, as torch.distributed.checkpoint would save them."""
    return dict(get_model_state_dict(model))


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `sharded_state_dict` gave."""
    set_model_state_dict(model, dict(state))


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions = FULL
) -> Mapping[str, Any]:
    """Complete optimizer state by FQN on every rank. Collectives: gathers; every rank calls."""
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], options: StateDictOptions = FULL
) -> None:
    """Like `load_full_state_dict`, for an optimizer's state."""
    set_optimizer_state_dict(model, optimizer, _passed(state, options), options=options)


def sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return this rank's shards of the optimizer state, as torch.distributed.checkpoint would save them."""
    return dict(get_optimizer_state_dict(model, optimizer))


def load_sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what torch.distributed.checkpoint put into `sharded_optimizer_state`."""
    set_optimizer_state_dict(model, optimizer, dict(state))


METHODS: Mapping[str, Any] = {
    "full_state_dict": full_state_dict,
    "load_full_state_dict": load_full_state_dict,
    "sharded_state_dict": sharded_state_dict,
    "load_sharded_state_dict": load_sharded_state_dict,
    "full_optimizer_state": full_optimizer_state,
    "load_full_optimizer_state": load_full_optimizer_state,
    "sharded_optimizer_state": sharded_optimizer_state,
    "load_sharded_optimizer_state": load_sharded_optimizer_state,
}
"""The functions for state, under the adapter's names."""
