"""What does a rank have of each original parameter inside the reference's flat parameters?

Read from handles in place: no collective, no unshard, no lazy initialisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from fsdp_ref.annotations import units_under
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_testing.implementations.protocol import Piece, StateEntry
from fsdp_testing.implementations.shared import flat_pieces, naming
from fsdp_testing.implementations.shared.flat_pieces import FlatOriginal, FlatUnit


def handles(model: nn.Module) -> Iterator[tuple[str, FlatHandle]]:
    """Yield (original FQN of the unit, handle) of every unit that owns parameters, depth first."""
    seen: set[int] = set()
    for name, _, unit in units_under(model):
        if unit.handle is not None and id(unit.handle) not in seen:
            seen.add(id(unit.handle))
            yield naming.original(name), unit.handle


def originals(prefix: str, handle: FlatHandle) -> Iterator[FlatOriginal]:
    """Yield every original of a flat parameter with its place in the whole and in this rank's shard."""
    mine = {piece.param_index: piece for piece in handle.shard_map.param_spans(handle.shard_rank)}
    for index, spec in enumerate(handle.layout.params):
        piece = mine.get(index)
        yield FlatOriginal(
            fqn=f"{prefix}.{spec.fqn}" if prefix else spec.fqn,
            shape=tuple(spec.shape),
            stride=tuple(spec.stride),
            contiguous=spec.contiguous,
            parameter=handle.originals.params[index] if handle.originals.use_orig_params else None,
            unsharded_start=handle.layout.span(index).start,
            shard_start=None if piece is None else piece.offset_in_shard,
            first=0 if piece is None else piece.span_in_param.start,
            count=0 if piece is None else piece.span_in_param.numel,
        )


def local_pieces(model: nn.Module) -> Mapping[str, tuple[Piece, ...]]:
    """Return this rank's spans of every parameter; collectives: none."""
    return flat_pieces.local_pieces(model, _flat_units(model))


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, StateEntry]]:
    """Return this rank's optimizer state; collectives: none."""
    return flat_pieces.optimizer_pieces(model, optimizer, _flat_units(model))


def _flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    for prefix, handle in handles(model):
        found = tuple(originals(prefix, handle))
        unsharded = handle.grads.local_F is not None and not _forgotten(handle)
        yield FlatUnit(
            parameter=handle.flat_param,
            originals=found,
            shard_S=handle.shard_S.detach(),
            unsharded_grad=unsharded,
            reduced_S=handle.grads.reduced_S if unsharded else None,
            values=dict(_given_values(handle, found)),
        )


def _given_values(handle: FlatHandle, found: Iterable[FlatOriginal]) -> Iterator[tuple[str, torch.Tensor]]:
    """Storage that users gave a parameter (a cast does): it becomes the shard's at its next use only."""
    for original in found if handle.originals.shown is Shown.SHARDED else ():
        if original.parameter is not None and original.parameter.numel() == original.count:
            yield original.fqn, flat_pieces.in_storage_order(original.parameter)


def _forgotten(handle: FlatHandle) -> bool:
    """Whether the user has cleared every gradient since: the handle reads that before its next use, not at once."""
    params = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
    return all(param.grad is None for param in params)
