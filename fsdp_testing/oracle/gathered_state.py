"""The state of the implementation after an operation: whole tensors put together from all ranks, for the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_testing.cases.records import ObservedPiece, RankObservation, Snapshot
from fsdp_testing.oracle.assemble import assemble
from fsdp_testing.oracle.tensors import same_bits


@dataclass(frozen=True, slots=True)
class GatheredState:
    """Everything an implementation holds at one point.

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
    """Return the state after every operation of which all ranks reported a snapshot."""
    everyone = [{snapshot.index: snapshot for snapshot in rank.snapshots} for rank in ranks]
    # A rank that raised has fewer snapshots: beyond its last one there is no whole state.
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
    # One rank that shows none hides its part of every whole.
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
