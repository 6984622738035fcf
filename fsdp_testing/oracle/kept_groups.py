"""Meshes of two axes and groups of some ranks: made once in a rank, since making one costs more than a case.

A world is replaced if a job leaks groups. So callers run `keep` as a separate job before a case; its groups are meant to stay,
and only other groups that an implementation makes count as leaked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.records import Case, WorldSpec
from fsdp_testing.ranks.pool.world import World, current_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LASTING = frozenset({"process group", "open file", "thread"})
"""Kinds of state that change when groups are made: themselves, their connections and their threads."""

_MESHES: dict[WorldSpec, DeviceMesh] = {}
_GROUPS: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """The mesh and groups that a case needs besides the group of all ranks.

    Attributes:
        world: The world with a mesh of two axes, if it has one.
        groups: Ranks of each group of some of them.
    """

    world: WorldSpec
    groups: tuple[tuple[int, ...], ...]

    @property
    def any(self) -> bool:
        """Whether there is something to make."""
        return bool(self.groups) or _has_two_axes(self.world)


def _has_two_axes(spec: WorldSpec) -> bool:
    return spec.tensor_parallel > 1 or len(spec.mesh_shape) == 2


def groups_of(case: Case) -> KeptGroups:
    """Return the mesh and groups that a case needs besides the group of all ranks."""
    groups = (ranks for operation in case.program for ranks in operation.groups(case.world.size))
    return KeptGroups(case.world, tuple(dict.fromkeys(groups)))


def keep(needed: KeptGroups) -> None:
    """Make what is missing. Collectives: those of making meshes and groups; every rank of the world calls."""
    mesh_in(current_world(), needed.world)
    data_group(current_world(), needed.world)
    for ranks in needed.groups:
        group_of(ranks)


def mesh_in(world: World, spec: WorldSpec) -> DeviceMesh:
    """Return the mesh of a case's world. Collectives: those of making it, the first time; every rank of the world calls."""
    from torch.distributed.device_mesh import init_device_mesh  # commands that run no case need not wait for torch

    if not _has_two_axes(spec):
        return world.mesh
    if spec not in _MESHES:
        shape, names = (spec.mesh, ("replicate", "shard")) if len(spec.mesh) == 2 else ((spec.replicas,), ("data",))
        if spec.tensor_parallel > 1:
            shape, names = (*shape, spec.tensor_parallel), (*names, "tensor")
        _MESHES[spec] = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    return _MESHES[spec]


def data_group(world: World, spec: WorldSpec) -> Any:
    """Return the ranks with different inputs. Collectives: as `mesh_in`, of that mesh without replicas."""
    return mesh_in(world, replace(spec, mesh=())).get_group("data") if spec.tensor_parallel > 1 else world.group


def group_of(ranks: tuple[int, ...]) -> Any:
    """Return a group of some ranks. Collectives: that of making it, the first time; every rank of the world calls."""
    import torch.distributed as dist

    if ranks not in _GROUPS:
        _GROUPS[ranks] = dist.new_group(ranks)
    return _GROUPS[ranks]
