"""Faults of loss scalers."""

from __future__ import annotations

from typing import Any

from planting import planted
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

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
