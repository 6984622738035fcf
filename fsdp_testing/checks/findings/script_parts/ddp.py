"""The parts of a script that synchronise, clip and gather with torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.checks.findings.script_parts.side_by_side import clean


class Access:
    """Of DistributedDataParallel."""

    @staticmethod
    def no_sync(model: DistributedDataParallel) -> Any:
        return model.no_sync()

    @staticmethod
    def clip(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    @staticmethod
    @contextlib.contextmanager
    def full_parameters(model: nn.Module, writeback: bool) -> Iterator[None]:
        yield

    @staticmethod
    def gathered(model: nn.Module) -> dict[str, Any]:
        return {clean(name): (p.detach(), p.grad, p.requires_grad) for name, p in model.named_parameters()}
