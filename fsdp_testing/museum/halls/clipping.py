"""Bugs of clipping by the total norm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ref.training import clip
from fsdp_ref.training.norms import TotalNorm
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _replicas_counted(original: Any, root: Any) -> Any:
    parts = original(root)
    return [part if part.group is not None else dataclasses.replace(part, group=dist.group.WORLD) for part in parts]


def _local_only(original: Any, root: Any) -> Any:
    return [dataclasses.replace(part, group=None) for part in original(root)]


def _root_of_one(original: Any, parts: Any, norm_type: float, device: torch.device) -> TotalNorm:
    norm: TotalNorm = original(parts, norm_type, device)
    return dataclasses.replace(norm, value=torch.ones_like(norm.value)) if math.isinf(norm_type) else norm


EXHIBITS = (
    Exhibit(
        id="B054",
        title="gradients that every rank holds count once per rank",
        story="The sum of the norms ran over all ranks for NO_SHARD units too, so their gradients counted as often as "
        "there are ranks, and everything was clipped too hard.",
        source="pytorch PR 88955",
        plant=planting((clip, "_parts", instead(_replicas_counted))),
        checks=("clipping.norm_2",),
    ),
    Exhibit(
        id="B059",
        title="the infinity norm is combined like a p-norm",
        story="Maxima of ranks were combined by a sum of powers and a root: x ** (1 / inf) is 1 for every x.",
        source="pytorch/torchrec PR 3199, pytorch PR 73405",
        plant=planting((clip, "total_norm", instead(_root_of_one))),
        checks=("clipping.norm_inf",),
    ),
    Exhibit(
        id="B147",
        title="each rank clips by the norm of its own shard",
        story="The norm was read from the local part of a sharded tensor, so ranks scale by different factors.",
        source="pytorch issue 170862",
        plant=planting((clip, "_parts", instead(_local_only))),
        checks=("clipping.norm_1", "clipping.norm_2", "clipping.norm_inf"),
    ),
)
