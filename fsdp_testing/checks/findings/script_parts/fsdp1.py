"""The parts of a script that synchronise, clip and gather with torch's FSDP1."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_testing.checks.findings.script_parts.side_by_side import clean


class Access:
    """Of FullyShardedDataParallel."""

    @staticmethod
    def no_sync(model: FSDP) -> Any:
        return model.no_sync()

    @staticmethod
    def clip(model: FSDP, max_norm: float, norm_type: float) -> torch.Tensor:
        return model.clip_grad_norm_(max_norm, norm_type)

    @staticmethod
    def full_parameters(model: nn.Module, writeback: bool) -> Any:
        return FSDP.summon_full_params(model, writeback=writeback)

    @staticmethod
    def gathered(model: nn.Module) -> dict[str, Any]:
        flags = {clean(name): p.requires_grad for name, p in model.named_parameters()}
        found: dict[str, Any] = {}
        for with_grads in (True, False):
            try:
                with FSDP.summon_full_params(model, writeback=False, with_grads=with_grads):
                    for name, p in model.named_parameters():
                        grad = p.grad.detach().clone() if with_grads and p.grad is not None else None
                        found[clean(name)] = (p.detach().clone(), grad, flags[clean(name)])
                return found
            except (NotImplementedError, AssertionError):
                continue
        return found

    @staticmethod
    def unsharded_bytes(model: nn.Module, units: Collection[str]) -> int:
        total = 0
        for name, module in model.named_modules():
            flat = module._handle.flat_param if isinstance(module, FSDP) and module._handle is not None else None
            for whole in ("_full_param_padded", "_full_prec_full_param_padded"):
                if clean(name) in units and getattr(flat, whole, None) is not None:
                    total += getattr(flat, whole).untyped_storage().size()
        return total
