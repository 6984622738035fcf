"""Bugs of clipping by the total norm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from planting import known_bug

from fsdp_ref.training import clip
from fsdp_ref.training.clip import TotalNorm


@known_bug("B054", clip, "_parts", "pytorch PR 88955", "clipping.norm_2")
def replicas_counted(original: Any, root: Any) -> Any:
    """Gradients that every rank holds count once per rank.

    The sum of the norms ran over all ranks for NO_SHARD units too, so their gradients counted as often as there are
    ranks, and everything was clipped too hard.
    """
    parts = original(root)
    return [part if part.group is not None else dataclasses.replace(part, group=dist.group.WORLD) for part in parts]


@known_bug("B059", clip, "total_norm", "pytorch/torchrec PR 3199, pytorch PR 73405", "clipping.norm_inf")
def root_of_one(original: Any, parts: Any, norm_type: float, device: torch.device) -> TotalNorm:
    """The infinity norm is combined like a p-norm.

    Maxima of ranks were combined by a sum of powers and a root: x ** (1 / inf) is 1 for every x.
    """
    norm: TotalNorm = original(parts, norm_type, device)
    return dataclasses.replace(norm, value=torch.ones_like(norm.value)) if math.isinf(norm_type) else norm


@known_bug("B147", clip, "_parts", "pytorch issue 170862", "clipping.norm_1 clipping.norm_2 clipping.norm_inf")
def local_only(original: Any, root: Any) -> Any:
    """Each rank clips by the norm of its own shard.

    The norm was read from the local part of a sharded tensor, so ranks scale by different factors.
    """
    return [dataclasses.replace(part, group=None) for part in original(root)]
