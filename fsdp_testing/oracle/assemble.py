"""Puts the local pieces of all ranks side by side, with holes and contradictions named.

The state of the implementation after an operation: whole tensors put together from all ranks, for the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_testing.cases.records import ObservedPiece, RankObservation, Snapshot
from fsdp_testing.oracle.tensors import bits, same_bits

RankPieces = tuple[int, Sequence[ObservedPiece]]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A whole tensor made of the ranks' pieces.

    Attributes:
        flat: All elements; those that no rank holds are 0.
        covered: The elements that some rank has; None for all.
        contradictions: Pairs of ranks that hold different bits for the same element, with the first such element.
    """

    flat: torch.Tensor
    covered: torch.Tensor | None
    contradictions: tuple[tuple[int, int, int], ...]

    @property
    def complete(self) -> bool:
        """Whether some rank has every element."""
        return self.covered is None or bool(self.covered.all())

    def first_hole(self) -> int:
        """Return the first element that no rank holds; there is one."""
        return 0 if self.covered is None else int((~self.covered).nonzero()[0])


def assemble(ranks: Iterable[RankPieces], shape: Sequence[int]) -> Assembled | None:
    """Put pieces together; None if no rank reports any piece."""
    numel = math.prod(shape)
    ranks = tuple(ranks)
    quick = _plain(ranks, numel)
    if quick is not None:
        return quick
    flat: torch.Tensor | None = None
    source = torch.full((numel,), -1, dtype=torch.int64)
    contradictions: list[tuple[int, int, int]] = []
    for rank, pieces in ranks:
        for piece in pieces:
            if flat is None:
                flat = torch.zeros(numel, dtype=piece.value.dtype)
            if piece.start < 0 or piece.stop > numel or piece.value.numel() != piece.stop - piece.start:
                contradictions.append((rank, rank, piece.start))
                continue
            if piece.stop > piece.start:
                contradictions += _contradiction(flat, source, rank, piece)
                # The first rank that holds an element gives it; the other ranks' values were compared above.
                fresh = source[piece.start : piece.stop] < 0
                flat[piece.start : piece.stop][fresh] = piece.value[fresh].to(flat.dtype)
                source[piece.start : piece.stop][fresh] = rank
    if flat is None:
        return None
    return Assembled(flat, source >= 0, tuple(contradictions))


def _plain(ranks: Sequence[RankPieces], numel: int) -> Assembled | None:
    """The common case, and much faster than element by element: spans side by side, or the same ones with equal bits."""
    spans: dict[tuple[int, int], torch.Tensor] = {}
    for _, pieces in ranks:
        for piece in pieces:
            if piece.stop <= piece.start:
                continue
            value = piece.value if piece.value.dim() == 1 else piece.value.reshape(-1)
            first = spans.setdefault((piece.start, piece.stop), value)
            # The slow way names the ranks that differ, and the element.
            if first is not value and not same_bits(first, value):
                return None
    end = 0
    values: list[torch.Tensor] = []
    for (start, stop), value in sorted(spans.items(), key=lambda item: item[0]):
        if start != end or value.numel() != stop - start or value.dtype != (values or [value])[0].dtype:
            return None
        end = stop
        values.append(value)
    if end != numel or not values:
        return None
    return Assembled(values[0] if len(values) == 1 else torch.cat(values), None, ())


def _contradiction(
    flat: torch.Tensor, source: torch.Tensor, rank: int, piece: ObservedPiece
) -> list[tuple[int, int, int]]:
    """Where `piece` differs from what an earlier rank holds of the same elements."""
    covered = source[piece.start : piece.stop] >= 0
    if not bool(covered.any()):
        return []
    before, now = flat[piece.start : piece.stop][covered], piece.value[covered]
    if same_bits(before, now):
        return []
    positions = covered.nonzero().reshape(-1) + piece.start
    first = int(positions[bits(before) != bits(now)][0] if before.dtype == now.dtype else positions[0])
    return [(int(source[first]), rank, first)]


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The complete state of an implementation at one point.

    Attributes:
        values: Parameters by FQN.
        gradients: Gradients by FQN, None where the gradient is None.
        optimizer: Optimizer state by FQN and state name; None if the implementation does not show it.
        buffers: Buffers by FQN, per rank.
    """

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    optimizer: Mapping[str, Mapping[str, torch.Tensor | float]] | None
    buffers: tuple[Mapping[str, torch.Tensor], ...]

    def same_as(self, other: GatheredState) -> bool:
        """Return whether both hold the same to the bit."""
        mine, theirs = ((state.values, state.gradients, state.optimizer, state.buffers) for state in (self, other))
        return _are_same(mine, theirs)


def states(ranks: Sequence[RankObservation]) -> dict[int, GatheredState]:
    """Return the state after every operation that all ranks reported a snapshot of."""
    everyone = [{snapshot.index: snapshot for snapshot in rank.snapshots} for rank in ranks]
    # A rank that raised has fewer snapshots: after its last one there is no complete state.
    shared = set(everyone[0]).intersection(*everyone[1:]) if everyone else set()
    return {index: _state([snapshots[index] for snapshots in everyone]) for index in sorted(shared)}


def _state(snapshots: Sequence[Snapshot]) -> GatheredState:
    values: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor | None] = {}
    shapes = {fqn: parameter.shape for snapshot in snapshots for fqn, parameter in snapshot.parameters.items()}
    for fqn, shape in shapes.items():
        by_rank = [(r, s.parameters[fqn].pieces) for r, s in enumerate(snapshots) if fqn in s.parameters]
        value = _whole(by_rank, shape)
        if value is not None:
            values[fqn] = value
        grads = [(r, s.parameters[fqn].grad_pieces or ()) for r, s in enumerate(snapshots) if fqn in s.parameters]
        gradients[fqn] = _whole(grads, shape)
    buffers = tuple({fqn: buffer.value for fqn, buffer in s.buffers.items()} for s in snapshots)
    return GatheredState(values, gradients, _optimizer(snapshots, shapes), buffers)


def _optimizer(
    snapshots: Sequence[Snapshot], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, torch.Tensor | float]] | None:
    # If one rank shows none, its part of every tensor is missing.
    if any(snapshot.optimizer is None for snapshot in snapshots):
        return None
    result: dict[str, dict[str, torch.Tensor | float]] = {}
    for fqn, shape in shapes.items():
        states_of = [(r, (s.optimizer or {}).get(fqn)) for r, s in enumerate(snapshots)]
        entries: dict[str, torch.Tensor | float] = {}
        for name in {name for _, state in states_of if state is not None for name in state.tensors}:
            by_rank = [(r, state.tensors.get(name, ())) for r, state in states_of if state is not None]
            whole = _whole(by_rank, shape)
            if whole is not None:
                entries[name] = whole
        for _, state in states_of:
            entries.update(state.scalars if state is not None else {})
        if entries:
            result[fqn] = entries
    return result


def _whole(by_rank: Sequence[tuple[int, Sequence[ObservedPiece]]], shape: tuple[int, ...]) -> torch.Tensor | None:
    whole = assemble(by_rank, shape)
    return None if whole is None or not whole.complete else whole.flat.reshape(shape)


def _are_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_are_same(value, right[key]) for key, value in left.items())
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_are_same, left, right))
    return type(left) is type(right) and bool(left == right)
