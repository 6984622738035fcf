"""Parameters that are DTensors on a mesh with named axes, as `fully_shard(dp_mesh_dims=...)` takes them (pytorch PR 176334)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

SUPPORTED = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


class WholeParameters(nn.Module):
    """A module that computes with the tensors inside its unsharded parameters, since its inputs are no DTensors."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor) or not all(placement.is_replicate() for placement in value.placements):
            return value
        # What each rank adds is a part of the sum, as with inputs that are DTensors.
        return value.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)


def distribute(model: nn.Module, mesh: DeviceMesh, ignored: AbstractSet[nn.Parameter]) -> DeviceMesh:
    """Make every parameter a DTensor that each rank has whole, and return its mesh: `mesh`, with names.

    Ignored parameters stay as they are. A parameter under several names stays one.
    """
    if mesh.mesh_dim_names is None:
        mesh = _named(mesh.get_group(), mesh.device_type)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in [*model.modules()]:
        own = [
            (name, value) for name, value in module._parameters.items() if value is not None and value not in ignored
        ]
        for name, value in own:
            if value not in made:
                whole = DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
                made[value] = nn.Parameter(whole, requires_grad=value.requires_grad)
            setattr(module, name, made[value])
        if own:
            module.__class__ = type(type(module).__name__, (WholeParameters, type(module)), {})
    return mesh


@cache
def _named(group: ProcessGroup, device_type: str) -> DeviceMesh:
    # Made once: a DTensor may have an older mesh that equals its own, which `fully_shard` refuses.
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


def options(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the argument that says which axes of `mesh` are those of data parallelism."""
    replicate = "replicate" if mesh.ndim > 1 else None
    return {"dp_mesh_dims": torch.distributed.fsdp.DataParallelMeshDims(shard="shard", replicate=replicate)}
