"""Finds the span of a parameter that a tensor holds, and joins spans to whole parameters.

Reads plain tensors and DTensors in place. Only `gather` communicates, and only `scatter_back` changes state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_testing.adapters.protocol import Piece, StateEntry
from fsdp_testing.errors import InvalidImplementation

Box = tuple[tuple[int, int], ...]
"""Per dimension of a whole tensor: first index and length of this rank's part."""

_AFTER_OTHERS = "_StridedShard"


def whole(tensor: torch.Tensor) -> Piece:
    """Return the piece of a rank that has the whole parameter."""
    return Piece(tuple(tensor.shape), 0, tensor.numel(), tensor.detach(), requires_grad=tensor.requires_grad)


def of_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, tuple[Piece, ...]]:
    """Pieces of parameters that are whole on every rank, or DTensors."""
    return {fqn: of_parameter(parameter) for fqn, parameter in named}


def of_parameter(parameter: torch.Tensor) -> tuple[Piece, ...]:
    """Value and gradient of one parameter; the gradient has separate pieces if its layout differs."""
    values = of_tensor(parameter)
    if parameter.grad is None:
        return values
    grads = of_tensor(parameter.grad)
    if [(p.start, p.stop) for p in values] == [(p.start, p.stop) for p in grads]:
        return tuple(replace(v, grad=g.value) for v, g in zip(values, grads))
    flag = parameter.requires_grad
    return (*values, *(replace(g, value=None, grad=g.value, reduced=False, requires_grad=flag) for g in grads))


def of_tensor(tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Pieces of one tensor, as values; a sparse tensor counts as dense."""
    if not isinstance(tensor, DTensor):
        return (whole(tensor if tensor.layout is torch.strided else tensor.to_dense()),)
    shape, flag = tuple(tensor.shape), tensor.requires_grad
    local, box = tensor.to_local().detach(), local_box(shape, tensor.device_mesh, tensor.placements)
    return tuple(Piece(shape, a, b, view, requires_grad=flag) for a, b, view in _runs(shape, box, local))


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """Return the box of indices that this rank has: each sharded dimension is cut as `torch.chunk` cuts it.

    Raises:
        InvalidImplementation: A placement is neither Shard nor Replicate.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in shape)
    box = [(0, size) for size in shape]
    kinds = [type(placement).__name__ for placement in placements]
    # The strided kind cuts what later axes have left: FSDP2 shards parameters that tensor parallelism has already cut.
    for axis in sorted(range(len(kinds)), key=lambda axis: (kinds[axis] == _AFTER_OTHERS, axis)):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if kinds[axis] not in ("Shard", _AFTER_OTHERS) or dim is None:
            raise InvalidImplementation(
                f"DTensor with placements {tuple(placements)}: expected Shard and Replicate, got {placement!r}. "
                "Give the adapter its own `local_pieces`."
            )
        first, size = box[dim]
        chunk = -(-size // mesh.size(axis))
        start = min(coordinate[axis] * chunk, size)
        box[dim] = (first + start, min(start + chunk, size) - start)
    return tuple(box)


def _runs(shape: tuple[int, ...], box: Box, local: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut a box into its row-major spans: `(start, stop, view of local)` each."""
    if local.numel() == 0:
        yield 0, 0, local
        return
    partial = [dim for dim, (_, count) in enumerate(box) if count != shape[dim]]
    last = partial[-1] if partial else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(count for _, count in box[last:])
    for index in itertools.product(*(range(count) for _, count in box[:last])):
        start = sum((box[dim][0] + i) * strides[dim] for dim, i in enumerate(index))
        start += box[last][0] * strides[last] if shape else 0
        yield start, start + length, local[index] if index else local


def optimizer_state(
    named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, StateEntry]]:
    """Return the optimizer's state by parameter name: tensors as pieces, single numbers as floats.

    Raises:
        InvalidImplementation: A DTensor's state is a plain tensor of another shape, so this rank's part is unknown.
    """
    result: dict[str, dict[str, StateEntry]] = {}
    for fqn, parameter in named.items():
        state = optimizer.state.get(parameter)
        if not state:
            continue
        result[fqn] = {}
        for name, value in state.items():
            single = isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != parameter.shape
            if isinstance(value, (int, float)) or single or name == "step":
                result[fqn][name] = float(value)
            elif isinstance(value, torch.Tensor):
                if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape != parameter.shape:
                    raise InvalidImplementation(
                        f"the optimizer's {name!r} of {fqn} is a plain tensor of shape {tuple(value.shape)}, and the parameter a "
                        f"DTensor of shape {tuple(parameter.shape)}: expected a DTensor, or the parameter's shape."
                    )
                result[fqn][name] = of_tensor(value)
    return result


def gather(local: Mapping[str, tuple[Piece, ...]]) -> dict[str, torch.Tensor]:
    """Return whole parameters from all ranks' pieces; elements that no rank has are NaN (or 0 for an integer parameter).

    Collectives: one object all-gather on the default group; every rank calls.
    """
    mine = [
        (fqn, p.shape, p.start, p.stop, p.value.reshape(-1).clone())
        for fqn, ps in local.items()
        for p in ps
        if p.value is not None
    ]
    everyone: list[list[tuple[str, tuple[int, ...], int, int, torch.Tensor]]] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        received: list[list[tuple[str, tuple[int, ...], int, int, torch.Tensor]] | None]
        received = [None] * dist.get_world_size()
        dist.all_gather_object(received, mine)
        everyone = [part for part in received if part is not None]
    full: dict[str, torch.Tensor] = {}
    for fqn, shape, start, stop, values in itertools.chain.from_iterable(everyone):
        if fqn not in full:
            nothing = float("nan") if values.is_floating_point() or values.is_complex() else 0
            full[fqn] = torch.full(shape, nothing, dtype=values.dtype)
        full[fqn].view(-1)[start:stop] = values
    return {fqn: full[fqn] for fqn in [*local, *(f for f in full if f not in local)] if fqn in full}


def scatter_back(full: Mapping[str, torch.Tensor], local: Mapping[str, tuple[Piece, ...]]) -> None:
    """Copy each piece's span of the whole parameter into the piece."""
    with torch.no_grad():
        for fqn, ps in local.items():
            for p in ps:
                if p.value is not None:
                    p.value.copy_(full[fqn].reshape(-1)[p.start : p.stop].view(p.value.shape))
