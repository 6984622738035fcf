"""The parts of a script that synchronise, clip and gather with torch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class Access:
    """Of fully_shard."""

    @staticmethod
    @contextlib.contextmanager
    def no_sync(model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    @staticmethod
    def clip(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    @staticmethod
    def gathered(model: nn.Module) -> dict[str, Any]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

        def whole(tensor: Any) -> Any:
            return None if tensor is None else tensor.full_tensor().detach()

        return {name: (whole(p), whole(p.grad), p.requires_grad) for name, p in model.named_parameters()}

    @staticmethod
    def unsharded_bytes(model: nn.Module, units: Collection[str]) -> int:
        total = 0
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and name in units:
                state: Any = module._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                    for parameter in group.fsdp_params if group is not None else ():
                        total += sum(whole.untyped_storage().size() for whole in parameter.all_gather_outputs)
        return total
