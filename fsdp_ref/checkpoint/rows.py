"""From flat shards to rows of each parameter, and back.

A sharded state has each parameter cut along its first dimension; flat shards are cut wherever the flat parameter is, inside
of rows too. Arithmetic gives both cuts, so each rank sends every other rank exactly the elements that it lacks, once, and no
rank has a whole parameter. Only a parameter whose elements are not stored in row-major order is sent whole to be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.comm.collectives import as_bytes
from fsdp_ref.comm.tensor_parallel import is_dtensor, local_of
from fsdp_ref.layout import Span

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle

Parts: TypeAlias = "Iterable[tuple[int, Tensor]]"
"""Flat tensors, each with the rank of the shard group that it goes to, or comes from."""


class Rows:
    """The layout of one unit's parameters on ranks: by flat shards, and by rows. Ranks count within the shard group."""

    def __init__(self, handle: FlatHandle) -> None:
        self._handle = handle
        self._layout = handle.layout
        self._map = handle.shard_map
        self._me = handle.shard_rank

    def by_interval(self, index: int) -> bool:
        """Return whether each rank's rows of a parameter are one interval of the flat parameter."""
        spec = self._layout.params[index]
        return spec.contiguous and bool(spec.shape)

    def _step(self, index: int) -> int:
        """Return the number of elements in a rank's rows; the last ranks may have fewer."""
        spec = self._layout.params[index]
        if not self.by_interval(index) or not spec.numel:
            return spec.numel
        return -(-spec.shape[0] // self._map.world_size) * (spec.numel // spec.shape[0])

    def span(self, index: int, rank: int) -> Span:
        """Return where in the flat parameter the rows of a rank are, or what they are cut from."""
        start, stop = self._layout.starts[index], self._layout.stops[index]
        if not self.by_interval(index):
            return Span(start, stop)
        step = self._step(index)
        return Span(min(start + rank * step, stop), min(start + (rank + 1) * step, stop))

    def _of_shard(self, index: int) -> Iterator[tuple[int, Span]]:
        """Yield which ranks have rows in this rank's piece of a parameter, and where."""
        start = self._layout.starts[index]
        shard, param = self._map.shard_span(self._me), self._layout.span(index)
        first, last = max(shard.start, param.start), min(shard.stop, param.stop)
        if first >= last:
            return
        step = self._step(index)
        every = range((first - start) // step, (last - 1 - start) // step + 1)
        for rank in every if self.by_interval(index) else range(self._map.world_size):
            rows = self.span(index, rank)
            yield rank, Span(max(first, rows.start), min(last, rows.stop))

    def _of_rows(self, index: int) -> Iterator[tuple[int, Span]]:
        """Yield which ranks have pieces of this rank's rows of a parameter in their shards, and where."""
        rows = self.span(index, self._me)
        if not rows.numel:
            return
        for rank in range(self._map.owner_at(rows.start), self._map.owner_at(rows.stop - 1) + 1):
            shard = self._map.shard_span(rank)
            yield rank, Span(max(rows.start, shard.start), min(rows.stop, shard.stop))

    def from_pieces(self, pieces: Mapping[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """Return this rank's rows of parameters, in memory of their own.

        Args:
            pieces: by the parameter's index what this rank's shard has of it, as ``Originals.pieces_of`` gives it; may be empty.
            dtype: of all pieces.

        Collectives:
            One exchange over the shard group. All of its ranks pass the same parameters.
        """
        device = self._handle.config.device
        flat = {index: torch.empty(self.span(index, self._me).numel, dtype=dtype, device=device) for index in pieces}
        self._exchange(
            _parts(_in_storage_order(self._handle, pieces), {index: list(self._of_shard(index)) for index in pieces}),
            _parts(flat, {index: list(self._of_rows(index)) for index in pieces}),
        )
        return {index: self._shaped(index, rows) for index, rows in flat.items()}

    def into_pieces(self, rows: Mapping[int, Tensor], pieces: Mapping[int, Tensor]) -> None:
        """Write the parameters' elements in this rank's shard.

        Args:
            rows: by the parameter's index this rank's rows of it; only such as are intervals (:meth:`by_interval`).
            pieces: where to write, flat.

        Collectives:
            One exchange over the shard group. All of its ranks pass the same parameters.
        """
        self._exchange(
            _parts({i: each.reshape(-1) for i, each in rows.items()}, {i: list(self._of_rows(i)) for i in rows}),
            _parts(pieces, {index: list(self._of_shard(index)) for index in rows}),
        )

    def _shaped(self, index: int, flat: Tensor) -> Tensor:
        spec = self._layout.params[index]
        if not spec.shape:
            return flat.view(())
        count = -(-spec.shape[0] // self._map.world_size)
        if self.by_interval(index):
            # Counted, not derived from the elements: rows without elements are rows too.
            return flat.view(max(0, min(spec.shape[0] - self._me * count, count)), *spec.shape[1:])
        full = flat.as_strided(spec.shape, spec.stride)
        return full[self._me * count : (self._me + 1) * count].clone(memory_format=torch.contiguous_format)

    def _exchange(self, given: Parts, taken: Parts) -> None:
        """Send flat tensors and fill others; this rank's own part is copied while the rest is in flight."""
        to, of = self._by_rank(given), self._by_rank(taken)
        own, own_places = to[self._me], of[self._me]
        to[self._me] = of[self._me] = []
        given_bytes, taken_bytes = ([sum(part.numel() for part in parts) for parts in by] for by in (to, of))
        device = self._handle.config.device
        with torch.no_grad():
            # One byte to itself: a backend need not accept empty messages, and torch's fake backend does not.
            given_bytes[self._me] = taken_bytes[self._me] = 1
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            to[self._me], of[self._me] = [byte], [torch.empty_like(byte)]
            places = [place for parts in of for place in parts]
            sent = torch.cat([part.to(device) for parts in to for part in parts])
            got = torch.empty(sum(taken_bytes), dtype=torch.uint8, device=device)
            group = self._handle.groups.shard
            pending = self._handle.collectives.exchange(got, taken_bytes, sent, given_bytes, group, self._handle.name)
            for place, part in zip(own_places, own, strict=True):
                place.copy_(part)
            pending.wait()
            for place, part in zip(places, got.split([place.numel() for place in places]), strict=True):
                place.copy_(part)

    def _by_rank(self, parts: Parts) -> list[list[Tensor]]:
        """Return the bytes of tensors, in their memory."""
        found: list[list[Tensor]] = [[] for _ in range(self._map.world_size)]
        for rank, part in parts:
            found[rank].append(as_bytes(part))
        return found


def rows_in(value: Any, handle: FlatHandle, index: int) -> Tensor | None:
    """Return this rank's rows of a parameter in a DTensor that is cut as `Spread` cuts; None for anything else.

    Where one rank has all of a parameter, nothing has to be exchanged.
    """
    if not handle.sharded or not is_dtensor(value) or handle.originals.extensions[index] is not None:
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements, spec = value.device_mesh, value.placements, handle.layout.params[index]
    by_rows = type(placements[-1]) is Shard and placements[-1].dim == 0
    by_rows = by_rows and all(isinstance(each, Replicate) for each in placements[:-1])
    if not by_rows or tuple(value.shape) != spec.shape or not Rows(handle).by_interval(index):
        return None
    if mesh.get_coordinate() is None or mesh_row(mesh) != dist.get_process_group_ranks(handle.groups.shard):
        return None
    return local_of(value)


def values_are_read(module: nn.Module, *, loading: bool) -> bool:
    """Return whether other code than that of ``nn.Module`` and ours sees parameters while their state is saved or loaded."""
    methods = ("_load_from_state_dict",) if loading else ("state_dict", "_save_to_state_dict", "get_extra_state")
    hooks = ("load_state_dict_pre", "load_state_dict_post") if loading else ("state_dict_pre", "state_dict")
    return any(
        any(getattr(type(each), name) is not getattr(nn.Module, name) for name in methods)
        or any(_is_foreign(hook) for kind in hooks for hook in getattr(each, f"_{kind}_hooks").values())
        for each in module.modules()
    )


def _is_foreign(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some of them
    return not str(getattr(hook, "__module__", "")).startswith("fsdp_ref.")


def _in_storage_order(handle: FlatHandle, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return pieces flat. Those of a shard are; where one rank has all (a shard group of one), they have shapes."""
    if handle.sharded:
        return dict(pieces)
    orders = {index: handle.layout.params[index].storage_order for index in pieces}
    return {index: piece.permute(orders[index]).reshape(-1) for index, piece in pieces.items()}


def piece_of(handle: FlatHandle, index: int, full: Tensor) -> Tensor:
    """Return, of a whole value of a sharded parameter, those elements that this rank's shard holds, flat."""
    flat = full.permute(handle.layout.params[index].storage_order).reshape(-1)
    offset, numel = handle.originals.pieces.get(index, (0, 0))
    first = handle.shard_map.shard_span(handle.shard_rank).start + offset - handle.layout.starts[index]
    return flat[first : first + numel] if numel else flat[:0]


def load_shard(
    handle: FlatHandle, module: nn.Module, indices: Mapping[str, int], state: dict[str, Any], prefix: str
) -> None:
    """Load entries of one module into the shard, and leave ``nn.Module`` what it has already to copy.

    ``indices`` are those of the module's parameters, by their names in it.

    What has another shape is left for ``nn.Module`` to report.

    Collectives:
        One exchange over the shard group for what is cut by rows, and those of ``DTensor.full_tensor`` for what is laid out
        otherwise. All ranks have the same entries.
    """
    rows: dict[int, Tensor] = {}
    shard = handle.originals.pieces_of(handle.shard_S)
    for name, index in indices.items():
        value = state.get(prefix + name)
        param = module._parameters.get(name)
        if not isinstance(value, Tensor) or param is None or value.shape != param.shape or value is param:
            continue
        state[prefix + name] = param
        mine = rows_in(value, handle, index)
        if mine is not None and mine.dtype == handle.shard_S.dtype:
            rows[index] = mine
            continue
        with torch.no_grad():
            full = whole(value) if is_dtensor(value) else value
            shard[index].copy_(piece_of(handle, index, full))
    if rows:
        Rows(handle).into_pieces(rows, {index: shard[index] for index in rows})


def whole(value: Any) -> Tensor:
    """Return the whole tensor of a DTensor, whatever its layout.

    Collectives:
        Those of ``DTensor.full_tensor``: an all-gather over the ranks of its mesh, all of which must call.
    """
    with torch.no_grad():
        # A state that was offloaded lies on the host; its mesh communicates between devices.
        full: Tensor = value.to(value.device_mesh.device_type).full_tensor()
    return full


def mesh_row(mesh: DeviceMesh) -> list[int]:
    """Return the ranks along the last axis of a mesh, where this rank is."""
    place: Sequence[int] = mesh.get_coordinate() or ()
    row: list[int] = mesh.mesh[tuple(place[:-1])].tolist()
    return row


def _parts(flat: Mapping[int, Tensor], spans: Mapping[int, list[tuple[int, Span]]]) -> Parts:
    """Yield the parts of flat tensors, each of which begins where its first span does."""
    for index, of_ranks in spans.items():
        for rank, span in of_ranks:
            start = span.start - of_ranks[0][1].start
            yield rank, flat[index][start : start + span.numel]
