"""Faults of optimizers and loss scalers."""

from __future__ import annotations

from typing import Any

import torch
from planting import planted
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import adam, sgd

from fsdp_ref.checkpoint import optim_load
from fsdp_ref.sharded_grad_scaler import ShardedGradScaler


@planted("fsdp_ref-wrapper", ShardedGradScaler, "_unscale_grads_", "loss_scaling.skips_together")
def each_rank_decides_by_itself(_original: Any, scaler: ShardedGradScaler, *arguments: Any) -> Any:
    """A rank skips a step if one of its own gradients is not finite; the others step."""
    return GradScaler._unscale_grads_(scaler, *arguments)


@planted("fsdp_ref-composable", GradScaler, "update", "loss_scaling.skips_together")
def the_scale_never_falls(original: Any, scaler: GradScaler, new_scale: Any = None) -> None:
    """After a step that was skipped the scale stays as it was."""
    before = scaler.get_scale()
    original(scaler, new_scale)
    if scaler.get_scale() < before:
        original(scaler, before)


@planted("fsdp_ref-composable", GradScaler, "step", "loss_scaling.trains")
def clipped_gradients_are_divided_again(original: Any, scaler: GradScaler, optimizer: Any, *more: Any) -> Any:
    """A step forgets that its gradients have been unscaled."""
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    return original(scaler, optimizer, *more)


@planted("fsdp_ref-composable", adam, "_fused_adam", "training.fused_adam")
def fused_adam_forgets_decay(original: Any, *arguments: Any, **options: Any) -> Any:
    """The fused kernel of Adam leaves weight decay out."""
    return original(*arguments, **{**options, "weight_decay": 0.0})


@planted("fsdp_ref-composable", sgd, "_fused_sgd", "training.fused_sgd")
def fused_sgd_forgets_decay(original: Any, *arguments: Any, **options: Any) -> Any:
    """The fused kernel of SGD leaves weight decay out."""
    return original(*arguments, **{**options, "weight_decay": 0.0})


@planted("fsdp_ref-wrapper", adam, "_multi_tensor_adam", "training.foreach")
def many_steps_count_as_one(original: Any, parameters: Any, *arguments: Any, **options: Any) -> Any:
    """Parameters that are stepped together leave the last one out."""
    lists = [each[:-1] if isinstance(each, list) else each for each in arguments]
    return original(parameters[:-1], *lists, **options)


@planted("fsdp_ref-wrapper", optim_load._Loading, "param_groups", "training.tensor_lr training.tensor_lr_in_shards")
def loads_no_rate_in_tensors(original: Any, self: Any) -> Any:
    """A learning rate in a tensor is loaded as 0."""
    return [
        {**group, "lr": group["lr"] * 0} if isinstance(group["lr"], torch.Tensor) else group for group in original(self)
    ]
