"""What does a rank hold of each original parameter inside torch FSDP1's flat parameters?

Read from the flat parameters' metadata: no collective, no unshard, no lazy initialisation. torch offers no public
way to this; the attributes used are listed in `_Flat` and nowhere else. Value spans are those of the persistent
shard, whatever copy is on the module at the moment. Gradients are those that the user and the optimizer see: of the
original parameters where these exist, else of the flat parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_testing.implementations.protocol import Piece, StateEntry
from fsdp_testing.implementations.shared import flat_pieces, naming, pieces
from fsdp_testing.implementations.shared.flat_pieces import FlatOriginal


class _Flat:
    """One unit's flat parameter, read through the private attributes that torch 2.11 to 2.15 share."""

    def __init__(self, prefix: str, unit: FullyShardedDataParallel) -> None:
        handle: Any = unit._handle
        flat: Any = handle.flat_param
        self.parameter: nn.Parameter = flat
        local = getattr(flat, "_local_shard", None)  # absent before lazy initialisation, when the data is the shard
        self.shard: torch.Tensor = (flat.data if local is None else local).detach()
        self.saved_grad: torch.Tensor | None = getattr(flat, "_saved_grad_shard", None)
        self.originals: list[FlatOriginal] = list(self._read(prefix, flat))
        self.by_original = bool(handle._use_orig_params)

    @staticmethod
    def _read(prefix: str, flat: Any) -> Iterator[FlatOriginal]:
        starts = itertools.accumulate(flat._numels_with_padding, initial=0)
        real = [start for start, padding in zip(starts, flat._is_padding_mask) if not padding]
        objects = flat._params if flat._params is not None else [None] * len(flat._fqns)
        rows = zip(flat._fqns, flat._shapes, flat._strides, flat._contiguities, objects, real, flat._shard_param_infos)
        for fqn, shape, stride, contiguous, parameter, start, info in rows:
            whole_name = ".".join(part for part in (prefix, naming.original(fqn)) if part)
            held = (info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard)
            place = held if info.in_shard else (None, 0, 0)
            yield FlatOriginal(whole_name, tuple(shape), tuple(stride), bool(contiguous), parameter, start, *place)

    def source(self, original: FlatOriginal) -> nn.Parameter:
        """The object whose flag, gradient and optimizer state are those of `original`."""
        return original.parameter if self.by_original and original.parameter is not None else self.parameter

    @property
    def gradient_is_unsharded(self) -> bool:
        """Whether `.grad` is what this rank accumulated itself, laid out like the unsharded flat parameter."""
        grad = self.parameter.grad
        return grad is not None and grad.numel() != self.shard.numel()


def _flats(model: nn.Module) -> Iterator[_Flat]:
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield _Flat(naming.original(name), unit)


def local_pieces(model: nn.Module) -> Mapping[str, tuple[Piece, ...]]:
    """See `Observable.local_pieces`. Parameters outside every unit (ignored ones) are whole."""
    result: dict[str, tuple[Piece, ...]] = {}
    flat_parameters: set[int] = set()
    for flat in _flats(model):
        flat_parameters.add(id(flat.parameter))
        for original in flat.originals:
            result[original.fqn] = _pieces_of(flat, original)
    return result | pieces.of_parameters(_outside(model, set(result), flat_parameters).items())


def _outside(model: nn.Module, managed: set[str], flat_parameters: set[int]) -> dict[str, nn.Parameter]:
    """Parameters that no unit manages, told by name: an unsharded unit shows other objects instead of its originals."""
    named = naming.named_parameters(model)
    return {fqn: p for fqn, p in named if fqn not in managed and id(p) not in flat_parameters}


def _pieces_of(flat: _Flat, original: FlatOriginal) -> tuple[Piece, ...]:
    value = _held(flat.shard, original)
    source = flat.source(original)
    grad, saved = _gradient(flat, original), flat.saved_grad
    unsharded = grad is not None and flat.gradient_is_unsharded
    beside = grad if not unsharded else (None if saved is None else _held(saved, original))
    flag = source.requires_grad
    values = flat_pieces.spans(original, original.first, original.count, value, beside, requires_grad=flag)
    if not unsharded:
        return tuple(values)
    own = flat_pieces.spans(original, 0, original.numel, grad, None, requires_grad=flag)
    return (*values, *(replace(p, value=None, grad=p.value, reduced=False) for p in own))


def _held(shard: torch.Tensor, original: FlatOriginal) -> torch.Tensor:
    if original.shard_start is None:
        return shard[:0]
    return shard[original.shard_start : original.shard_start + original.count]


def _gradient(flat: _Flat, original: FlatOriginal) -> torch.Tensor | None:
    """The original's gradient in storage order: of its held span, or all of it while it is unsharded."""
    if flat.by_original and original.parameter is not None:
        grad = original.parameter.grad
        if grad is None:
            return None
        return grad.detach().as_strided((grad.numel(),), (1,)) if grad.ndim != 1 else grad.detach()
    if flat.parameter.grad is None:
        return None
    grad = flat.parameter.grad.detach().reshape(-1)
    if flat.gradient_is_unsharded:
        return grad[original.unsharded_start : original.unsharded_start + original.numel]
    return _held(grad, original)


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, StateEntry]]:
    """See `Observable.optimizer_pieces`: an original's own state, or its part of the flat parameter's."""
    result: dict[str, dict[str, StateEntry]] = {}
    managed: set[str] = set()
    flat_parameters: set[int] = set()
    for flat in _flats(model):
        flat_parameters.add(id(flat.parameter))
        for original in flat.originals:
            managed.add(original.fqn)
            own = flat.by_original and original.parameter is not None
            state = optimizer.state.get(flat.source(original))
            if state:
                result[original.fqn] = {
                    name: _entry(original, value, own) for name, value in state.items() if _kept(value)
                }
    return result | pieces.optimizer_state(_outside(model, managed, flat_parameters), optimizer)


def _kept(value: object) -> bool:
    return isinstance(value, (torch.Tensor, int, float))


def _entry(original: FlatOriginal, value: torch.Tensor | float, own: bool) -> StateEntry:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return float(value)
    flat_value = value.detach()
    if flat_value.ndim != 1:
        flat_value = flat_value.as_strided((flat_value.numel(),), (1,))
    held = flat_value if own else _held(flat_value, original)
    return tuple(flat_pieces.spans(original, original.first, original.count, held, None, requires_grad=True))
