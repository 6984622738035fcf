"""Units over parameters that tensor parallelism has already cut.

``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors over one axis of a device mesh; units are
made over the other. [Note: two axes] Each rank flattens its local tensors, so that a unit's shard group are the ranks with
the same place on the tensor-parallel axis. In forward modules find DTensors over the local views again. Their gradients come
back in the parameter's own layout: DTensor's backward adds partial sums over the axis where a parameter is replicated (a
norm between activations that are cut along the sequence), so nothing is left to be added here. A plain parameter beside
them is the same on all ranks of the axis as long as it meets activations that are whole.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.comm.collectives import gather_objects
from fsdp_ref.comm.groups import DataParallelGroups
from fsdp_ref.errors import WritebackError
from fsdp_ref.layout import row_major_stride
from fsdp_ref.storage.extension import ParameterExtension

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTensor: TypeAlias = Any
"""torch needs half a second to import the module, and a caller with a DTensor has already imported it."""


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a DTensor (without importing the class where none can exist)."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, on the same memory, outside of autograd."""
    with torch.no_grad():
        # Under no_grad: the gradient of a flat parameter comes by its own node, and not through DTensor.
        local: Tensor = value.to_local()
    return local


def over(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Return the DTensor of a shape of which ``local`` is this rank's part; differentiable."""
    from torch.distributed.tensor import DTensor as Spread

    # ``run_check`` would send a message: all ranks have cut the same parameter.
    return Spread.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def rebuilder(value: DTensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a DTensor like ``value`` from a local tensor."""
    mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()
    return lambda local: over(local, mesh, placements, shape, stride)


class TensorAxis:
    """The tensor-parallel ranks around this one, as the units over one shard group see them.

    Attributes:
        mesh: the mesh of the axis.
        group: its group.
    """

    _known: WeakValueDictionary[tuple[int, int], TensorAxis] = WeakValueDictionary()
    # By shard group and this rank's axis. An axis lives as long as a model does, which a garbage collector may keep on some
    # ranks alone: what is exchanged once has to live as long as the groups, which all ranks destroy together.
    _rows: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], list[list[int]]]] = WeakKeyDictionary()

    def __init__(self, mesh: DeviceMesh, shard: dist.ProcessGroup) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self._shard = shard
        self._both: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh, shard: dist.ProcessGroup) -> TensorAxis:
        """Return the axis, one for all parameters of all units; it keeps both groups, so that their ids stay unique."""
        key = id(mesh.get_group()), id(shard)
        # An entry lives as long as its axis, which holds both groups: a key never refers to deleted groups.
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = cls(mesh, shard)
        return found

    def with_shards(self, shard_mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh (tensor parallel, shard).

        In this order a DTensor is cut over the axis first and each part over the shard group then, as units do it.

        Collectives:
            Once for these groups an exchange of ranks over the shard group.
        """
        # Once: every entry of every saved parameter asks for it.
        if self._both is None:
            ranks = torch.tensor(self._axes_of_shards(), dtype=torch.int).t().contiguous()
            names = [(self.mesh.mesh_dim_names or ("tp",))[-1], (shard_mesh.mesh_dim_names or ("shard",))[-1]]
            # Of groups that are there: making new ones would need all ranks of the world.
            self._both = DeviceMesh.from_group(
                [self.group, self._shard], self.mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names)
            )
        return self._both

    def _axes_of_shards(self) -> list[list[int]]:
        """Return the ranks of the axis that each rank of the shard group is on."""
        mine, known = dist.get_process_group_ranks(self.group), self._rows.setdefault(self._shard, {})
        if tuple(mine) not in known:
            known[tuple(mine)] = gather_objects(mine, self._shard)
        return known[tuple(mine)]


class TensorParallel(ParameterExtension):
    """One parameter that ``parallelize_module`` made a DTensor.

    Attributes:
        axis: the ranks over which it is laid out.
        placements: how.
    """

    def __init__(self, param: DTensor, axis: TensorAxis) -> None:
        self.shape = param.shape
        self.group = axis.group
        self.axis = axis
        self._stride = param.stride()
        self.placements = tuple(param.placements)
        # Copies on all ranks of the axis have equal gradients, which must count once in a norm.
        self.differs = not self.placements[0].is_replicate()

    @classmethod
    def of(cls, param: Tensor, groups: DataParallelGroups) -> TensorParallel | None:
        """Return the extension of a DTensor; None for any other parameter. Check :func:`why_not` first."""
        value: Any = param
        return cls(value, TensorAxis.of(value.device_mesh, groups.shard)) if is_dtensor(param) else None

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return the local tensor.

        Raises:
            WritebackError: not a DTensor of the parameter's shape and layout.
        """
        value: Any = tensor
        if is_dtensor(tensor) and (value.shape, tuple(value.placements)) == (self.shape, self.placements):
            # On the parameter's own memory: an edit of the DTensor is an edit of what is flattened.
            return local_of(value)
        got = (
            f"one of shape {tuple(tensor.shape)}"
            if not is_dtensor(tensor)
            else f"{tuple(tensor.shape)} as {value.placements}"
        )
        raise WritebackError(
            f"parameter of tensor parallelism: expected a DTensor of shape {tuple(self.shape)} as {self.placements}, "
            f"got {got}. Edit it in place, or assign distribute_tensor(value, mesh, placements)."
        )

    def unflatten(self, view: Tensor) -> Tensor:
        """Return the DTensor over a local view."""
        return over(view, self.axis.mesh, self.placements, self.shape, self._stride)

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole value. Collectives: those of ``DTensor.full_tensor`` over the axis."""
        with torch.no_grad():
            # Entries of an offloaded unit lie on the host, between whose tensors the group may not communicate.
            here = local.detach().to(self.axis.mesh.device_type).contiguous()
            # Gathered and saved values are laid out anew; the parameter's own strides are those of its memory here.
            spread: Any = over(here, self.axis.mesh, self.placements, self.shape, row_major_stride(self.shape))
            whole: Tensor = spread.full_tensor()
        return whole

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole value."""
        from torch.distributed.tensor import distribute_tensor

        # Without a source rank nothing is sent: every rank has the whole value.
        with torch.no_grad():
            return local_of(distribute_tensor(whole.detach(), self.axis.mesh, self.placements, src_data_rank=None))

    def chunk(self, rows: Tensor, mesh: DeviceMesh, placements: list[Any]) -> Tensor:
        """Return a DTensor over the mesh (tensor parallel, shard)."""
        both = self.axis.with_shards(mesh)
        with torch.no_grad():
            return over(
                rows.detach(), both, (*self.placements, placements[-1]), self.shape, row_major_stride(self.shape)
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """A copied model computes with the same ranks."""
        # An axis holds process groups, which cannot be copied.
        return self


def why_not(param: Tensor, groups: DataParallelGroups | None, device: torch.device) -> str | None:
    """Return why a unit over ``groups`` (None: still to be made) that computes on ``device`` cannot flatten a parameter.

    Returns:
        None for a parameter that is no DTensor, or is one over an axis beside these groups.
    """
    if not is_dtensor(param):
        return None
    from torch.distributed.tensor import Replicate, Shard

    value: Any = param
    mesh, placements = value.device_mesh, value.placements
    if mesh.ndim != 1 or mesh.get_coordinate() is None:
        return f"over a mesh of {mesh.ndim} axes, expected one axis that this rank is on"
    if type(placements[0]) not in {Shard, Replicate}:
        return f"laid out as {placements[0]!r}, expected Shard or Replicate"
    # Moving a DTensor would make another one; its hooks and its layout are the user's.
    if param.is_meta or param.device != device:
        return f"on {param.device}, expected values on {device}, where the unit computes"
    # Made by host, they could not be told apart from the axis before they are there.
    if groups is None:
        return (
            "in a unit whose groups are made by host, expected device_mesh, or groups, beside the tensor-parallel axis"
        )
    # This rank itself is on both axes; any other one would get two parts of one parameter.
    axis = set(dist.get_process_group_ranks(mesh.get_group()))
    for group in (groups.shard, groups.replicate):
        both = axis.intersection([] if group is None else dist.get_process_group_ranks(group)) - {dist.get_rank()}
        if both:
            return (
                f"over ranks {sorted(axis)}, of which the unit is sharded or replicated over {sorted(both)} too, "
                "expected device_mesh to be the other axis (mesh['dp'])"
            )
    return None
