"""Takes the snapshot of a rank: local pieces, copied; no communication, no change of state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fsdp_testing.adapters import protocol
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import (
    BufferObservation,
    ObservedPiece,
    OptimizerObservation,
    ParameterObservation,
    Snapshot,
)
from fsdp_testing.oracle.models import dtype_name


def snapshot_of(
    adapter: Adapter, model: nn.Module, optimizer: torch.optim.Optimizer | None, index: int, label: str
) -> Snapshot:
    """Report what this rank has of parameters, gradients, optimizer state and buffers.

    Collectives: none if `adapter.observes_locally`; else those of its gathering, and every rank must call.
    """
    parameters = {fqn: _parameter(fqn, pieces) for fqn, pieces in adapter.local_pieces(model).items() if pieces}
    buffers = {
        fqn: BufferObservation(fqn, dtype_name(buffer.dtype), buffer.detach().clone())
        for fqn, buffer in adapter.named_buffers(model)
    }
    state = None
    if optimizer is not None and "optimizer_pieces" in adapter.capabilities:
        state = {fqn: _state(fqn, entries) for fqn, entries in adapter.optimizer_pieces(model, optimizer).items()}
    return Snapshot(index, label, parameters, buffers, state)


def _parameter(fqn: str, pieces: Iterable[protocol.Piece]) -> ParameterObservation:
    own = tuple(pieces)
    values = [(piece.start, piece.stop, piece.value) for piece in own if piece.value is not None]
    grads = [(piece.start, piece.stop, piece.grad) for piece in own if piece.grad is not None]
    return ParameterObservation(
        fqn=fqn,
        shape=tuple(own[0].shape),
        dtype=dtype_name(values[0][2].dtype) if values else "",
        requires_grad=own[0].requires_grad,
        pieces=tuple(_copied(*entry) for entry in values),
        grad_pieces=tuple(_copied(*entry) for entry in grads) if grads else None,
        grad_dtype=dtype_name(grads[0][2].dtype) if grads else None,
    )


def _state(fqn: str, entries: Mapping[str, protocol.StateEntry]) -> OptimizerObservation:
    tensors, scalars = {}, {}
    for name, entry in entries.items():
        if isinstance(entry, tuple):
            tensors[name] = tuple(_copied(p.start, p.stop, p.value) for p in entry if p.value is not None)
        else:
            scalars[name] = float(entry)
    return OptimizerObservation(fqn, tensors, scalars)


# Copies: the implementation goes on with the memory that it shows.
def _copied(start: int, stop: int, value: torch.Tensor) -> ObservedPiece:
    return ObservedPiece(start, stop, value.detach().reshape(-1).clone())
