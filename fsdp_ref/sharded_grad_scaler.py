"""A loss scaler for sharded gradients.

It works as in one process, with one addition: if any rank finds a gradient that is not finite, all ranks skip the step. So
shards of one parameter never diverge, and all scales stay equal. Ranks whose shards hold no gradient take part.

Source: ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` for the name, arguments and defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.comm.groups import default_group
from fsdp_ref.errors import FsdpValueError

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``GradScaler`` for gradients that are spread over ranks, on the CPU and on devices.

    Args:
        device: type of the device that losses are on; without such a device the scaler warns and does nothing.
        init_scale: the first scale.
        backoff_factor: multiplies the scale after a step that was skipped.
        growth_factor: multiplies it after ``growth_interval`` steps in a row that were not.
        growth_interval: see above.
        enabled: False makes every method behave as without scaling.
        process_group: the ranks that skip together. Default: all. For hybrid sharding all replicas belong to it.

    Collectives:
        One all-reduce of one number in ``unscale_``, or in ``step`` if ``unscale_`` was not called. All ranks must call, with
        gradients or without.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Return tensors multiplied by the scale, in their own dtypes and containers.

        Args:
            outputs: a tensor, or an iterable of tensors with any nesting; iterables other than lists and tuples give a map.

        Raises:
            FsdpValueError: something else.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            # A scalar in half precision times the scale is single precision, and backward would go on in that.
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            scaled = [self.scale(each) for each in outputs]
            return type(outputs)(*scaled) if getattr(outputs, "_fields", None) else type(outputs)(scaled)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            return map(self.scale, outputs)
        raise FsdpValueError(
            f"ShardedGradScaler.scale: outputs must be a Tensor or an iterable of Tensors, got {outputs!r} of "
            f"type {type(outputs).__name__}. Pass the losses."
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients, half precision included, and let all ranks know what one has found.

        The base class calls this on every way to a step; what is returned decides about it, per device with gradients.
        """
        _coalesce_in_single_precision(optimizer)
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        together = torch.zeros(1, dtype=torch.float32, device=inv_scale.device)
        for each in found.values():
            together += each.to(together.device)
        group = self.process_group or default_group()
        collectives_for(group, together.device).all_reduce(together, group, "ShardedGradScaler", op="max").wait()
        for each in found.values():
            each.copy_(together.reshape(each.shape))
        # Without a gradient of its own this rank decides by what the others found.
        return found or {together.device: together.reshape(found_inf.shape)}


def _coalesce_in_single_precision(optimizer: Optimizer) -> None:
    """Add up repeated indices of sparse gradients in half precision, so that an overflow of the sum is seen."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is not None and grad.is_sparse and grad.dtype == torch.float16 and not grad.is_coalesced():
                summed = grad.to(torch.float32).coalesce()
                values = summed.values().to(torch.float16)
                param.grad = torch.sparse_coo_tensor(
                    summed.indices(), values, summed.shape, is_coalesced=True, check_invariants=False
                )
