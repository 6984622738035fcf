"""What may be claimed, and how is state saved and loaded, where every rank has everything? As without data parallelism."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_testing.implementations.shared import naming

CLAIMS = frozenset(
    {
        "no_shard",
        "nested_wrapping",  # units mean nothing to it, and naming some changes nothing
        "no_sync",
        "accumulate_without_no_sync",
        "forward_only",
        "data_assignment",
        "inference_mode",
        "late_optimizer",
        "shared_parameters",
        "shared_across_units",
        "reused_modules",
        "frozen_parameters",
        "frozen_mixed_unit",
        "unused_parameters",
        "unused_parameters_differ",
        "unused_gradient_is_none",
        "uneven_parameters",
        "zero_dim_parameters",
        "empty_parameters",
        "strided_parameters",
        "mixed_dtype_units",
        "buffers",
        "container_outputs",
        "uneven_batches",
        "loss_bypasses_output",
        "inplace_on_output",
        "clip_grad_norm",
        "error_if_nonfinite",
        "tensor_hooks",
        "optimizer_pieces",
        "summon_writeback",
        "full_state_dict",
        "optim_state",
        "activation_checkpointing",
    }
)
"""What follows from every rank having everything."""


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the unwrapped module's `state_dict`, by original names. Collectives: none."""
    state = naming.unwrapped(model).state_dict()
    return {naming.original(fqn): tensor.detach().clone() for fqn, tensor in state.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Call the unwrapped module's `load_state_dict`. Collectives: none."""
    inside = naming.unwrapped(model)
    inside.load_state_dict({fqn: state[naming.original(fqn)] for fqn in inside.state_dict()})


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return the optimizer's state by original name instead of by place. Collectives: none."""
    named = dict(naming.named_parameters(model))
    state = {fqn: copy.deepcopy(optimizer.state[p]) for fqn, p in named.items() if p in optimizer.state}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put the state where the parameters of these names are. Collectives: none."""
    for fqn, parameter in naming.named_parameters(model):
        if fqn in state["state"]:
            optimizer.state[parameter] = copy.deepcopy(state["state"][fqn])
    for group, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(kept)
