"""This rank's part of a sharded state, and how parts are put together again.

Both forms are DTensors, so that they carry their global shape and their ranks, and that
``torch.distributed.checkpoint`` saves them once and loads them on any number of ranks.

Sharded: each parameter is cut along its first dimension, into chunks as ``torch.chunk`` makes them; the last ranks may
have a short one or none. Flat shards are cut elsewhere, inside of rows, so nearly every chunk has elements of several
ranks: the unit is gathered whole, as for computing, and each rank copies its rows. A scalar is on every rank.

Local: the flat parameter is one tensor of one dimension, and each rank's chunk is its flat shard without right padding.
Nothing is sent, and only a unit of the same layout over as many ranks can read it. Over tensor parallelism see ``RawForm``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.annotations import owners_of
from fsdp_ref.checkpoint.rows import mesh_row
from fsdp_ref.comm.collectives import gather_objects
from fsdp_ref.comm.tensor_parallel import TensorParallel, is_dtensor, over
from fsdp_ref.errors import FsdpRuntimeError, listing
from fsdp_ref.layout import row_major_stride
from fsdp_ref.naming import FLAT_PARAM, clean_tensor_name
from fsdp_ref.states import ReshardReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.unit import Unit
    from fsdp_ref.storage.extension import ParameterExtension


class Spread:
    """The ranks and the layout over which one unit's entries are spread.

    The user's own mesh if the unit was given one, so that its axes keep their names: (replicate, shard) for hybrid strategies.
    Otherwise a mesh of the shard group, a separate one for every replica.

    Attributes:
        mesh: the ranks.
        size: how many of them have different chunks.
    """

    def __init__(self, handle: FlatHandle) -> None:
        from torch.distributed.tensor import Replicate, Shard  # torch needs half a second for this import

        groups = handle.groups
        self._handle = handle
        self.mesh = DeviceMesh.from_group(groups.shard, handle.config.device.type)
        if groups.mesh is not None and mesh_row(groups.mesh) == dist.get_process_group_ranks(groups.shard):
            # Its ranks may stand in another order than in its groups, and flat shards then too.
            self.mesh = groups.mesh
        self.size = self.mesh.size(self.mesh.ndim - 1)
        self._replicated = [Replicate()] * self.mesh.ndim
        self._sharded = [*self._replicated[:-1], Shard(0)]

    @cached_property
    def raw(self) -> RawForm:
        """The entry of a local state. Collectives: those of ``RawForm``, once."""
        return RawForm(self._handle, self)

    def chunk(self, full: Tensor, extension: ParameterExtension | None = None) -> Tensor:
        """Return this rank's chunk of a whole parameter, copied, as a DTensor; a scalar is replicated.

        Of one that is a part of a larger one itself ``full`` is that part (see ``ParameterExtension.chunk``).
        """
        rows = full
        if full.dim():
            count = -(-full.shape[0] // self.size)
            first = min(self.mesh.get_local_rank(self.mesh.ndim - 1) * count, full.shape[0])
            rows = full[first : first + count]
        # The buffer of the whole is given back; what is kept is these rows alone.
        return self.entry(rows.clone(memory_format=torch.contiguous_format), tuple(full.shape), extension)

    def entry(self, rows: Tensor, shape: tuple[int, ...], extension: ParameterExtension | None = None) -> Tensor:
        """Return the DTensor of this rank's rows of a parameter of that shape."""
        if extension is not None:
            return extension.chunk(rows, self.mesh, self._sharded if shape else self._replicated)
        return self._dtensor(rows, shape)

    def _dtensor(self, mine: Tensor, shape: tuple[int, ...]) -> Tensor:
        placements = self._sharded if shape else self._replicated
        with torch.no_grad():
            return over(mine.detach(), self.mesh, placements, torch.Size(shape), row_major_stride(shape))


class RawForm:
    """The entry of a local state that holds this rank's flat shard.

    Ranks of a tensor-parallel axis have flat parameters of their own, of which no two need be equally long. [Note: raw
    shards over two axes] Under one name they must be parts of one tensor, or ``torch.distributed.checkpoint`` would keep those
    of one rank for all. So the entry is cut over both axes, and every part is as long as the longest shard.

    Args:
        handle: the flat parameter.
        spread: of its unit.

    Collectives:
        Over a tensor-parallel axis an exchange of sizes, and what ``TensorAxis.with_shards`` sends. All ranks of both axes call.
    """

    def __init__(self, handle: FlatHandle, spread: Spread) -> None:
        self._handle = handle
        self._mine = handle.shard_map.shard_span(handle.shard_rank).numel
        self._mesh, self._axes, self._stored, self._numel = spread.mesh, 1, self._mine, handle.layout.numel
        cut = next((each for each in handle.originals.extensions if isinstance(each, TensorParallel)), None)
        if cut is not None:
            self._mesh, self._axes = cut.axis.with_shards(spread.mesh), 2
            self._stored = max(gather_objects(handle.shard_map.shard_numel, cut.group))
            self._numel = self._stored * self._mesh.size()

    def entry(self) -> Tensor:
        """Return a copy of the flat shard as a DTensor."""
        from torch.distributed.tensor import Replicate, Shard

        flat = self._handle.shard_S.new_zeros(self._stored)
        flat[: self._mine].copy_(self._handle.shard_S[: self._mine].detach())
        placements = [Replicate()] * (self._mesh.ndim - self._axes) + [Shard(0)] * self._axes
        return over(flat, self._mesh, placements, torch.Size([self._numel]), (1,))

    def problem(self, value: Any) -> str | None:
        """Return why ``value`` cannot be this rank's entry; None when it can."""
        wanted = (
            f"{self._stored} of {self._numel} elements of {self._handle.shard_S.dtype}, saved by {self._at(self._mesh)}"
        )
        if not is_dtensor(value):
            return f"expected a flat shard ({wanted}), got {_described(value)}"
        local = value.to_local()
        got = f"{local.numel()} of {value.numel()} elements of {value.dtype}, saved by {self._at(value.device_mesh)}"
        return None if got == wanted and value.dim() == 1 else f"expected {wanted}, got {got}"

    def take(self, value: Any) -> None:
        """Copy an entry into the flat shard."""
        with torch.no_grad():
            self._handle.shard_S[: self._mine].copy_(value.to_local()[: self._mine])

    def _at(self, mesh: DeviceMesh) -> str:
        """Return the place on the axes over which shards differ. A saved mesh keeps the place of the rank that saved it."""
        place = (mesh.get_coordinate() or [None])[-self._axes :]
        return f"rank {_by(place)} of {_by(mesh.mesh.shape[-self._axes :])}"


def _by(numbers: Sequence[Any]) -> str:
    return " x ".join(map(str, numbers))


def compare_ranks(
    state: Mapping[str, Any], prefix: str, group: dist.ProcessGroup, axis: dist.ProcessGroup | None = None
) -> None:
    """Check that all ranks are about to gather the same, before any of them waits for another.

    Raises:
        FsdpRuntimeError: on every rank, when their DTensors differ in name, shape, dtype or layout.

    Collectives:
        One exchange of a line for each DTensor over ``group``, and of what came over ``axis``.
    """
    mine = [
        (
            f"{clean_tensor_name(key)}: {tuple(value.shape)} of {value.dtype} as {value.placements}",
            f" on {value.device_mesh.mesh.tolist()}{_of_another_rank(value)}",
        )
        for key, value in state.items()
        if key.startswith(prefix) and is_dtensor(value)
    ]
    per_rank = gather_objects([what + where for what, where in mine], group)
    odd = _odd(per_rank)
    if axis is not None:
        # An entry that is not cut over the axis is on different ranks for each rank of the axis.
        parts = gather_objects(([what for what, _ in mine], odd), axis)
        odd = [line for _, lines in parts for line in lines] or _odd([what for what, _ in parts])
    if odd:
        raise FsdpRuntimeError(
            "load_state_dict of a sharded state: expected the same sharded entries in the same order on every rank, "
            f"got {listing(dict.fromkeys(odd))}. Load the files of all ranks of one save, or use "
            "torch.distributed.checkpoint."
        )


def _odd(per_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return the entries that at least one rank lacks."""
    if all(lines == per_rank[0] for lines in per_rank):
        return []
    common = set(per_rank[0]).intersection(*per_rank[1:])
    odd = [f"rank {rank}: {line}" for rank, lines in enumerate(per_rank) for line in lines if line not in common]
    return odd or ["another order of the same entries"]


def _of_another_rank(value: Any) -> str:
    """Return the owner of chunk ``value`` if it is not this rank: a rank may have read another rank's file."""
    place = value.device_mesh.get_coordinate()
    rank = None if place is None else int(value.device_mesh.mesh[tuple(place)])
    return "" if rank == dist.get_rank() else f", the chunk of rank {rank}"


def take_flat_shard(
    unit: Unit, form: RawForm, module: nn.Module, state: dict[str, Any], prefix: str, reports: tuple[list[str], ...]
) -> None:
    """Load the flat shard here, and give ``nn.Module`` what it has already to copy."""
    missing, unexpected, errors = reports
    for name in owners_of(module)[unit]:
        if prefix + name in state:
            unexpected.append(prefix + name)
            del state[prefix + name]
        if name in module._parameters:
            state[prefix + name] = module._parameters[name]
    if module is not unit.module:
        return
    key = prefix + FLAT_PARAM
    if key not in state:
        missing.append(key)
    elif (problem := form.problem(state[key])) is not None:
        errors.append(
            f"{clean_tensor_name(key)}: {problem}. The same units on the same number of ranks can read a local state."
        )
    else:
        unit.reshard(ReshardReason.OUT_OF_DATE)
        form.take(state[key])
    state.pop(key, None)
    if FLAT_PARAM in module._parameters:
        state[key] = module._parameters[FLAT_PARAM]


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
