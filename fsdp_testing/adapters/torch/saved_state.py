"""Saves and loads state, and divides gradients, as all of torch's implementations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_testing.adapters.protocol import Division

_FULL = StateDictOptions(full_state_dict=True)


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Complete tensors on every rank. Collectives: gathers over the model's groups; every rank calls."""
    state: dict[str, Any] = get_model_state_dict(model, options=_FULL)
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Every rank passes the complete tensors and takes its part of them."""
    set_model_state_dict(model, dict(state), options=_FULL)


def sharded_state_dict(model: nn.Module) -> Mapping[str, Any]:
    """Return this rank's shards, as torch.distributed.checkpoint would save them."""
    return dict(get_model_state_dict(model))


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `sharded_state_dict` gave."""
    set_model_state_dict(model, dict(state))


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Complete optimizer state by FQN on every rank. Collectives: gathers; every rank calls."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_FULL))


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Every rank passes the complete state and takes its part of it."""
    set_optimizer_state_dict(model, optimizer, dict(state), options=_FULL)


def sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return this rank's shards of the optimizer state, as torch.distributed.checkpoint would save them."""
    return dict(get_optimizer_state_dict(model, optimizer))


def load_sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what torch.distributed.checkpoint put into `sharded_optimizer_state`."""
    set_optimizer_state_dict(model, optimizer, dict(state))


def split_division(world_size: int) -> Division:
    """About the square root of the world size before the sum and the rest after.

    So 16-bit values neither overflow nor underflow. The first factor doubles while it divides the world size and is smaller
    than the rest.
    """
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return Division(before=before, after=world_size / before)


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
