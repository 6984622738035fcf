"""What does a rank hold of each original parameter inside the reference's flat parameters?

Read from handles in place: no collective, no unshard, no lazy initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from fsdp_ref.annotations import units_under
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_testing.implementations.protocol import Piece, StateEntry
from fsdp_testing.implementations.shared import flat_pieces, naming, pieces
from fsdp_testing.implementations.shared.flat_pieces import FlatOriginal


def handles(model: nn.Module) -> Iterator[tuple[str, FlatHandle]]:
    """(original FQN of the unit, handle) of every unit that owns parameters, depth first."""
    seen: set[int] = set()
    for name, _, unit in units_under(model):
        if unit.handle is not None and id(unit.handle) not in seen:
            seen.add(id(unit.handle))
            yield naming.original(name), unit.handle


def originals(prefix: str, handle: FlatHandle) -> Iterator[FlatOriginal]:
    """Every original of a flat parameter with its place in the whole and in this rank's shard."""
    held = {piece.param_index: piece for piece in handle.shard_map.param_spans(handle.shard_rank)}
    for index, spec in enumerate(handle.layout.params):
        piece = held.get(index)
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
    """See `Observable.local_pieces`. Parameters outside every unit (ignored ones) are whole."""
    result: dict[str, tuple[Piece, ...]] = {}
    flat: set[int] = set()
    for prefix, handle in handles(model):
        flat.add(id(handle.flat_param))
        for original in originals(prefix, handle):
            result[original.fqn] = _pieces_of(handle, original)
    outside = {n: p for n, p in naming.named_parameters(model) if n not in result and id(p) not in flat}
    return result | pieces.of_parameters(outside.items())


def _pieces_of(handle: FlatHandle, original: FlatOriginal) -> tuple[Piece, ...]:
    value = _value(handle, original)
    source = original.parameter if original.parameter is not None else handle.flat_param
    local = handle.grads.local_F is not None and not _forgotten(handle)
    reduced = handle.grads.reduced_S if local else None
    grad = None if local else _own_grad(handle, original)
    beside = _held(reduced, original) if reduced is not None else grad
    flag = source.requires_grad
    values = flat_pieces.spans(original, original.first, original.count, value, beside, requires_grad=flag)
    if not local:
        return tuple(values)
    whole = _own_grad(handle, original)
    own = flat_pieces.spans(original, 0, original.numel, whole, None, requires_grad=flag)
    return (*values, *(replace(piece, value=None, grad=piece.value, reduced=False) for piece in own))


def _value(handle: FlatHandle, original: FlatOriginal) -> torch.Tensor:
    """What users see. Storage that they gave a parameter (a cast does) becomes the shard's at its next use only."""
    mine = original.parameter
    if mine is None or handle.originals.shown is not Shown.SHARDED or mine.numel() != original.count:
        return _held(handle.shard_S.detach(), original)
    return _in_storage_order(mine.detach())


def _forgotten(handle: FlatHandle) -> bool:
    """Whether the user has cleared every gradient since: the handle reads that before its next use, not at once."""
    params = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
    return all(param.grad is None for param in params)


def _held(flat_S: torch.Tensor, original: FlatOriginal) -> torch.Tensor:
    if original.shard_start is None:
        return flat_S[:0]
    return flat_S[original.shard_start : original.shard_start + original.count]


def _own_grad(handle: FlatHandle, original: FlatOriginal) -> torch.Tensor | None:
    """The gradient that users see, in storage order: of the held span, or all of it while it is not reduced."""
    if original.parameter is not None:
        grad = original.parameter.grad
        return None if grad is None else _in_storage_order(grad.detach())
    if handle.flat_param.grad is None:
        return None
    flat = handle.flat_param.grad.detach().reshape(-1)
    if handle.grads.local_F is not None:
        return flat[original.unsharded_start : original.unsharded_start + original.numel]
    return _held(flat, original)


def _in_storage_order(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.ndim == 1 else grad.as_strided((grad.numel(),), (1,))


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, StateEntry]]:
    """See `Observable.optimizer_pieces`: an original's own state, or its part of the flat parameter's."""
    result: dict[str, dict[str, StateEntry]] = {}
    managed: set[str] = set()
    flat: set[int] = set()
    for prefix, handle in handles(model):
        flat.add(id(handle.flat_param))
        for original in originals(prefix, handle):
            managed.add(original.fqn)
            source = original.parameter if original.parameter is not None else handle.flat_param
            state = optimizer.state.get(source)
            if state:
                kept = {n: v for n, v in state.items() if isinstance(v, (torch.Tensor, int, float))}
                result[original.fqn] = {name: _entry(original, value) for name, value in kept.items()}
    outside = {n: p for n, p in naming.named_parameters(model) if n not in managed and id(p) not in flat}
    return result | pieces.optimizer_state(outside, optimizer)


def _entry(original: FlatOriginal, value: torch.Tensor | float) -> StateEntry:
    if not isinstance(value, torch.Tensor) or (value.ndim == 0 and original.parameter is None):
        return float(value)
    if value.ndim == 0 and original.shape != ():
        return float(value)
    stored = _in_storage_order(value.detach())
    held = stored if original.parameter is not None else _held(stored, original)
    return tuple(flat_pieces.spans(original, original.first, original.count, held, None, requires_grad=True))
