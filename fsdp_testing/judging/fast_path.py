"""Is this case beyond doubt? A comparison that is quick to say yes and never says it wrongly.

Most cases agree with the oracle to the bit or nearly so. What does passes here, with a bound that is smaller than
the one of the full comparison everywhere; whatever does not, or is unusual in any way, is left to
`checkers.agreement`, which alone may call something a divergence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.quantities import Quantity
from fsdp_testing.checkers.tensors import same_bits
from fsdp_testing.programs.models import dtype_name
from fsdp_testing.programs.replay import ReplayPoint
from fsdp_testing.records import UNIT_ROUNDOFF, ObservedPiece, OperationResult, RankObservation, Snapshot

ROUNDINGS = 12
"""Fewer than `oracle.roundings_of` gives for any case: ranks, micro-batches, and at least one layer with its rows."""

Ranks = Sequence[RankObservation]


def fast_path_agrees(points: Sequence[ReplayPoint], ranks: Ranks, asked: Comparison = Comparison()) -> int:
    """Return how many tensors were compared if everything agrees beyond doubt, and -1 if not.

    Args:
        points: What the undisturbed oracle holds.
        ranks: What each rank reports, by rank.
        asked: Which kinds to compare, and whether a gradient of zeros may stand for None.
    """
    if any(rank.error is not None for rank in ranks):
        return -1
    results = [{result.index: result for result in rank.results} for rank in ranks]
    snapshots = [{snapshot.index: snapshot for snapshot in rank.snapshots} for rank in ranks]
    compared = 0
    for point in points:
        if point.snapshot:
            held = [by_index.get(point.index) for by_index in snapshots]
            found = _snapshot_agrees(point, [one for one in held if one is not None], len(ranks), asked)
        else:
            found = _results_agree(point, [by_index.get(point.index) for by_index in results])
        if found < 0:
            return -1
        compared += found
    return compared


def _results_agree(point: ReplayPoint, results: Sequence[OperationResult | None]) -> int:
    norms = []
    for quantity, expected in point.values.items():
        result = results[quantity.rank]
        actual = None if result is None else result.values.get(quantity.name)
        if actual is None or expected is None or not _close(actual, expected):
            return -1
        if quantity.name == "total_norm":
            norms.append(actual)
    # The norm is one number over all ranks: they must agree to the bit.
    return len(point.values) if all(same_bits(norm, norms[0]) for norm in norms) else -1


def _snapshot_agrees(point: ReplayPoint, snapshots: list[Snapshot], count: int, asked: Comparison) -> int:
    if len(snapshots) != count:
        return -1
    for quantity, expected in point.values.items():
        if quantity.kind == "value":
            good = _value_agrees(point, quantity, expected, snapshots)
        elif quantity.kind == "gradient":
            skipped = point.pending or not asked.gradients
            good = skipped or _gradient_agrees(quantity, expected, snapshots, none_is_zero=asked.none_is_zero)
        elif quantity.kind == "optimizer":
            good = not asked.optimizer or _state_agrees(quantity, expected, snapshots)
        else:
            buffer = snapshots[quantity.rank].buffers.get(quantity.name)
            good = buffer is not None and expected is not None and _close(buffer.value, expected)
        if not good:
            return -1
    return len(point.values)


def _value_agrees(
    point: ReplayPoint, quantity: Quantity, expected: torch.Tensor | None, snapshots: list[Snapshot]
) -> bool:
    held: list[tuple[ObservedPiece, ...]] = []
    for snapshot in snapshots:
        seen = snapshot.parameters.get(quantity.name)
        if seen is None:
            continue
        if seen.dtype and seen.dtype != point.dtypes[quantity.name]:
            return False
        if seen.requires_grad != point.requires_grad[quantity.name]:
            return False
        held.append(seen.pieces)
    return expected is not None and _pieces_agree(held, expected)


def _gradient_agrees(
    quantity: Quantity, expected: torch.Tensor | None, snapshots: list[Snapshot], *, none_is_zero: bool
) -> bool:
    held: list[tuple[ObservedPiece, ...]] = []
    absent = 0
    for snapshot in snapshots:
        seen = snapshot.parameters.get(quantity.name)
        if seen is None or all(piece.stop <= piece.start for piece in seen.pieces):
            continue
        if seen.grad_pieces is None:
            absent += 1
            continue
        if seen.grad_dtype != seen.dtype:
            return False
        held.append(seen.grad_pieces)
    if expected is None:
        return not held or (none_is_zero and not any(bool(p.value.any()) for pieces in held for p in pieces))
    if absent:
        return none_is_zero and not bool(expected.any()) and not held
    return _pieces_agree(held, expected)


def _state_agrees(quantity: Quantity, expected: torch.Tensor | None, snapshots: list[Snapshot]) -> bool:
    held: list[tuple[ObservedPiece, ...]] = []
    for snapshot in snapshots:
        if snapshot.optimizer is None:
            return False
        state = snapshot.optimizer.get(quantity.name)
        if state is None:
            continue
        if quantity.part in state.tensors:
            held.append(state.tensors[quantity.part])
        elif quantity.part in state.scalars:
            if expected is None or expected.numel() != 1 or float(expected) != state.scalars[quantity.part]:
                return False
        else:
            return False
    if expected is None:
        return False
    return _pieces_agree(held, expected) if held else expected.numel() == 1


def _pieces_agree(held: list[tuple[ObservedPiece, ...]], expected: torch.Tensor) -> bool:
    """Whether the ranks' pieces are the expected tensor: complete, close, and equal to the bit where they overlap."""
    numel = expected.numel()
    if not numel:
        return True
    flat = expected.reshape(-1)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for pieces in held:
        for piece in pieces:
            if piece.stop <= piece.start:
                continue
            span = (piece.start, piece.stop)
            known = seen.get(span)
            if known is not None:
                if not same_bits(known, piece.value):
                    return False
                continue
            if piece.start < 0 or piece.stop > numel or not _close(piece.value, flat[piece.start : piece.stop]):
                return False
            seen[span] = piece.value
    end = 0
    for start, stop in sorted(seen):
        if start != end:
            return False
        end = stop
    return end == numel


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if torch.equal(actual, expected):
        return True
    if not actual.is_floating_point() or not actual.numel():
        return False
    limit = ROUNDINGS * UNIT_ROUNDOFF[dtype_name(actual.dtype)] * float(expected.abs().max())
    # A NaN makes the comparison false, which is what it must be: never cleared here.
    return bool(float((actual - expected).abs().max()) <= limit)
