"""Parameters that are DTensors on a mesh with named axes, as `fully_shard(dp_mesh_dims=...)` takes them (pytorch PR 176334)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch.distributed.fsdp
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.errors import InvalidImplementation

SUPPORTED = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
SETTINGS = frozenset({"named_axes", "flattened_axes"})
_TENSOR = "tensor"
_FLATTENED = ("shard_outer", "shard_inner")
"""Two axes over which parameters are sharded as over one."""


class LocalParameters(nn.Module):
    """A module that computes with its unsharded parameters as if the axes of data parallelism were not there.

    Its inputs are no DTensors on those axes. A parameter is a DTensor on the tensor-parallel axis if the harness has cut it over
    that axis, and a plain tensor otherwise.
    """

    cut: ClassVar[frozenset[str]] = frozenset()
    tensor_mesh: ClassVar[DeviceMesh | None] = None

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor) or name not in self._parameters or _is_sharded(value):
            return value
        placements = value.placements[_data_axes(value.device_mesh) :]
        # What each rank adds is a part of the sum, as with inputs that are DTensors.
        parts = [Partial()] * _data_axes(value.device_mesh)
        local = value.to_local(grad_placements=[*parts, *placements])
        if name not in self.cut or self.tensor_mesh is None:
            return local
        return DTensor.from_local(
            local, self.tensor_mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def _data_axes(mesh: DeviceMesh) -> int:
    """Return how many axes come before that of tensor parallelism."""
    return mesh.ndim - (_TENSOR in (mesh.mesh_dim_names or ()))


def _is_sharded(value: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in value.placements[: _data_axes(value.device_mesh)])


def distribute(model: nn.Module, setup: Setup, ignored: AbstractSet[nn.Parameter]) -> Setup:
    """Make every parameter a DTensor on a mesh with a name for each axis, and return the setup with that mesh.

    Each rank has the parameter whole, or over the tensor-parallel axis the part that it was cut into. Ignored parameters stay as
    they are. A parameter under several names stays one.

    Collectives: with `flattened_axes` those of making a mesh; every rank of the world calls.
    """
    mesh = _mesh_of(setup)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in [*model.modules()]:
        own = [
            (name, value) for name, value in module._parameters.items() if value is not None and value not in ignored
        ]
        cut = frozenset(name for name, value in own if isinstance(value, DTensor))
        for name, value in own:
            if value not in made:
                made[value] = nn.Parameter(_distributed(mesh, value.detach()), requires_grad=value.requires_grad)
            setattr(module, name, made[value])
        if own:
            bases = (LocalParameters, type(module))
            module.__class__ = type(type(module).__name__, bases, {"cut": cut, "tensor_mesh": setup.tensor_mesh})
    return replace(setup, mesh=mesh)


def _distributed(mesh: DeviceMesh, value: torch.Tensor) -> DTensor:
    data = [Replicate()] * _data_axes(mesh)
    if isinstance(value, DTensor):
        local, placements = value.to_local(), [*data, *value.placements]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _mesh_of(setup: Setup) -> DeviceMesh:
    assert setup.mesh is not None
    mesh = setup.mesh if setup.world_mesh is None else setup.world_mesh
    if "flattened_axes" in setup.settings:
        if setup.strategy.startswith("hybrid"):
            raise InvalidImplementation(
                f"torch-fsdp2: expected flattened_axes with a strategy of one axis, got {setup.strategy!r}. Drop one."
            )
        return _with_two_shard_axes(mesh)
    return mesh if mesh.mesh_dim_names is not None else _named(mesh.get_group(), mesh.device_type)


@cache
def _named(group: ProcessGroup, device_type: str) -> DeviceMesh:
    # Made once: a DTensor may have an older mesh that equals its own, which `fully_shard` refuses.
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


@cache
def _with_two_shard_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of `mesh` with its axis of data parallelism divided in two, the inner of two ranks if that divides it."""
    data, *tensor = mesh.shape
    inner = 1 if data % 2 else 2
    names = (*_FLATTENED, _TENSOR)[: 2 + len(tensor)]
    return init_device_mesh(mesh.device_type, (data // inner, inner, *tensor), mesh_dim_names=names)


def options(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the argument that says which axes of `mesh` are those of data parallelism."""
    names = mesh.mesh_dim_names or ()
    replicate = "replicate" if "replicate" in names else None
    shard = tuple(name for name in names if name not in ("replicate", _TENSOR))
    dims = torch.distributed.fsdp.DataParallelMeshDims(shard=shard if len(shard) > 1 else shard[0], replicate=replicate)
    return {"dp_mesh_dims": dims}
