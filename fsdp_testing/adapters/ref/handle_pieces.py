"""What does a rank have of each original parameter inside the reference's flat parameters?

Read from handles in place: no collective, no unshard, no lazy initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdp_ref.annotations import units_under
from fsdp_ref.comm.tensor_parallel import TensorParallel
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_testing.adapters.shared import flat_pieces, naming, pieces
from fsdp_testing.adapters.shared.flat_pieces import FlatOriginal, FlatUnit


def handles(model: nn.Module) -> Iterator[tuple[str, FlatHandle]]:
    """Yield (original FQN of the unit, handle) of every unit that owns parameters, depth first."""
    seen: set[int] = set()
    for name, _, unit in units_under(model):
        if not unit.handle.empty and id(unit.handle) not in seen:
            seen.add(id(unit.handle))
            yield naming.original(name), unit.handle


def originals(prefix: str, handle: FlatHandle) -> Iterator[FlatOriginal]:
    """Yield every original of a flat parameter with its place in the whole and in this rank's shard."""
    mine = {piece.param_index: piece for piece in handle.shard_map.param_spans(handle.shard_rank)}
    for index, spec in enumerate(handle.layout.params):
        piece, cut = mine.get(index), handle.originals.extensions[index]
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
            part=_part(cut) if isinstance(cut, TensorParallel) else None,
        )


def _part(cut: TensorParallel) -> tuple[tuple[int, ...], pieces.Box]:
    shape = tuple(cut.shape)
    return shape, pieces.local_box(shape, cut.axis.mesh, cut.placements)


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """Yield every flat parameter as it is on this rank now."""
    for prefix, handle in handles(model):
        found = tuple(originals(prefix, handle))
        # Whether the user has cleared every gradient since: the handle reads that before its next use, not at once.
        params = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
        unsharded = handle.grads.local_F is not None and any(param.grad is not None for param in params)
        sharded = handle.originals.shown is Shown.SHARDED
        yield FlatUnit(
            parameter=handle.flat_param,
            originals=found,
            shard_S=handle.shard_S.detach(),
            unsharded_grad=unsharded,
            reduced_S=handle.grads.reduced_S if unsharded else None,
            # Storage that users gave a parameter (a cast does) becomes the shard's at its next use only.
            values={
                one.fqn: flat_pieces.in_storage_order(one.parameter)
                for one in found
                if sharded and one.parameter is not None and one.parameter.numel() == one.count
            },
        )
