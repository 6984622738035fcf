"""The part of each original parameter that a rank holds, in any implementation with flat parameters.

A flat parameter keeps each original in its storage order; reports are in row-major order. An adapter describes its
flat parameters (`FlatUnit`), read in place: no collective, no unshard, no lazy initialisation. Value spans are those of
the persistent shard, whatever copy is on the module at the moment. Gradients are those that the user and the optimizer
see: of the original parameters where these exist, else of the flat parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Piece, StateEntry
from fsdp_testing.adapters.shared import naming, pieces


@dataclass(frozen=True, slots=True)
class FlatOriginal:
    """One original parameter inside a flat parameter.

    Attributes:
        fqn: Original name.
        shape: Whole shape.
        stride: Strides under which the flat parameter stores it.
        contiguous: Whether storage order is row-major order.
        parameter: The original's own object, or None for a plain flat parameter.
        unsharded_start: Offset in the unsharded flat parameter.
        shard_start: Offset in this rank's shard; None if the rank holds none of it.
        first: First element of this rank's span, in storage order.
        count: Number of elements of the span.
        part: For a parameter cut by tensor parallelism: the shape of the uncut parameter, and the box that `shape` and `stride`
            describe. Reports are about the uncut parameter.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    parameter: nn.Parameter | None
    unsharded_start: int
    shard_start: int | None
    first: int
    count: int
    part: tuple[tuple[int, ...], pieces.Box] | None = None

    @property
    def numel(self) -> int:
        """Number of elements in the flat parameter."""
        return torch.Size(self.shape).numel()

    def places(self) -> torch.Tensor:
        """Return the row-major index of each element in the whole parameter, in storage order."""
        whole, box = self.part or (self.shape, tuple((0, size) for size in self.shape))
        rows = torch.arange(torch.Size(whole).numel()).view(whole)
        order = torch.empty_strided(self.shape, self.stride, dtype=torch.int64)
        order.copy_(rows[tuple(slice(first, first + count) for first, count in box)])
        return order.as_strided((self.numel,), (1,))


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter as it is on this rank now.

    Attributes:
        parameter: It.
        originals: Every original parameter in it.
        shard_S: The rank's persistent shard.
        unsharded_grad: Whether the gradient that users see is this rank's own sum, laid out like the unsharded flat
            parameter and not reduced yet.
        reduced_S: The gradient that was reduced before that sum, if any.
        values: The original's span in storage order, if users see another tensor than the shard.
    """

    parameter: nn.Parameter
    originals: tuple[FlatOriginal, ...]
    shard_S: torch.Tensor
    unsharded_grad: bool = False
    reduced_S: torch.Tensor | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def source(self, original: FlatOriginal) -> nn.Parameter:
        """Return the object that holds the flag, gradient and optimizer state of `original`."""
        return self.parameter if original.parameter is None else original.parameter

    def gradient(self, original: FlatOriginal) -> torch.Tensor | None:
        """Return the gradient that users see, in storage order: of the rank's span, or all of it while unsharded."""
        grad = self.source(original).grad
        if grad is None:
            return None
        if original.parameter is not None:
            return in_storage_order(grad)
        flat = grad.detach().reshape(-1)
        if self.unsharded_grad:
            return flat[original.unsharded_start : original.unsharded_start + original.numel]
        return span_of(flat, original)


def methods(units: Callable[[nn.Module], Iterable[FlatUnit]]) -> dict[str, Any]:
    """Return the observing methods of an adapter with these flat parameters; collectives: none."""
    return {
        "local_pieces": lambda model: local_pieces(model, units(model)),
        "optimizer_pieces": lambda model, optimizer: optimizer_pieces(model, optimizer, units(model)),
    }


def local_pieces(model: nn.Module, units: Iterable[FlatUnit]) -> Mapping[str, tuple[Piece, ...]]:
    """Return the rank's part of each parameter; parameters outside every unit (ignored ones) are whole."""
    result: dict[str, tuple[Piece, ...]] = {}
    flat: set[int] = set()
    for unit in units:
        flat.add(id(unit.parameter))
        for original in unit.originals:
            result[original.fqn] = _pieces_of(unit, original)
    return result | pieces.of_parameters(_outside(model, set(result), flat).items())


def optimizer_pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, units: Iterable[FlatUnit]
) -> Mapping[str, Mapping[str, StateEntry]]:
    """Return the optimizer's state: an original's own, or its part of the flat parameter's."""
    result: dict[str, dict[str, StateEntry]] = {}
    managed: set[str] = set()
    flat: set[int] = set()
    for unit in units:
        flat.add(id(unit.parameter))
        for original in unit.originals:
            managed.add(original.fqn)
            state = optimizer.state.get(unit.source(original))
            if state:
                kept = {n: v for n, v in state.items() if isinstance(v, (torch.Tensor, int, float))}
                result[original.fqn] = {name: _entry(original, value) for name, value in kept.items()}
    return result | pieces.optimizer_state(_outside(model, managed, flat), optimizer)


def span_of(flat_S: torch.Tensor, original: FlatOriginal) -> torch.Tensor:
    """Return the original's span of a tensor that is laid out like the rank's shard."""
    if original.shard_start is None:
        return flat_S[:0]
    return flat_S[original.shard_start : original.shard_start + original.count]


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of all elements as they lie in memory."""
    detached = tensor.detach()
    return detached if detached.ndim == 1 else detached.as_strided((detached.numel(),), (1,))


def _outside(model: nn.Module, managed: set[str], flat: set[int]) -> dict[str, nn.Parameter]:
    """Parameters that no unit manages, by name: an unsharded unit shows other objects instead of its originals."""
    return {fqn: p for fqn, p in naming.named_parameters(model) if fqn not in managed and id(p) not in flat}


def _pieces_of(unit: FlatUnit, original: FlatOriginal) -> tuple[Piece, ...]:
    value = unit.values.get(original.fqn)
    value = span_of(unit.shard_S, original) if value is None else value
    grad = unit.gradient(original)
    flag = unit.source(original).requires_grad
    if grad is None or not unit.unsharded_grad:
        return tuple(spans(original, original.first, original.count, value, grad, requires_grad=flag))
    reduced = None if unit.reduced_S is None else span_of(unit.reduced_S, original)
    values = spans(original, original.first, original.count, value, reduced, requires_grad=flag)
    own = spans(original, 0, original.numel, grad, None, requires_grad=flag)
    return (*values, *(replace(piece, value=None, grad=piece.value, reduced=False) for piece in own))


def _entry(original: FlatOriginal, value: torch.Tensor | float) -> StateEntry:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.ndim == 0 and (original.parameter is None or original.shape != ()):
        return float(value)
    stored = in_storage_order(value)
    span = stored if original.parameter is not None else span_of(stored, original)
    return tuple(spans(original, original.first, original.count, span, None, requires_grad=True))


def spans(
    original: FlatOriginal,
    first: int,
    count: int,
    value: torch.Tensor | None,
    grad: torch.Tensor | None,
    *,
    requires_grad: bool,
) -> Iterator[Piece]:
    """Yield elements [first, first+count) in storage order as spans in row-major order."""
    shape = original.shape if original.part is None else original.part[0]
    if count == 0 or (original.contiguous and original.part is None):
        yield Piece(shape, first, first + count, value, grad, requires_grad=requires_grad)
        return
    for offset, start, length in _runs(original, first, count):
        cut = slice(offset, offset + length)
        yield Piece(
            shape,
            start,
            start + length,
            None if value is None else value[cut],
            None if grad is None else grad[cut],
            requires_grad=requires_grad,
        )


def _runs(original: FlatOriginal, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """`(offset in the span, row-major start, length)` of each run of neighbours."""
    logical = original.places()[first : first + count].tolist()
    begin = 0
    for end in range(1, count + 1):
        if end == count or logical[end] != logical[end - 1] + 1:
            yield begin, logical[begin], end - begin
            begin = end
