"""Checks how many elements of the parameters a rank holds: right numbers do not show an implementation that never shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from fsdp_testing.cases.records import (
    Case,
    FailureKind,
    Finding,
    ObservedPiece,
    ParameterObservation,
    RankObservation,
)
from fsdp_testing.judging.checkers.explain import finding, ranks_text
from fsdp_testing.oracle import models
from fsdp_testing.oracle.quantities import Expectation

_PADDING = 16
"""Elements of a parameter that alignment may move from one rank to another."""


def review(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the finding that ranks hold more or less than their share when nothing is gathered, as right after wrapping.

    The ranks of one replica hold every element together; none of them holds more than its part, with padding.
    """
    for kind, who, statement in _problems(case, ranks):
        text = f"{ranks_text(who)} {statement} of a replica, which {case.strategy} divides by {_shards(case)}"
        return finding(case, kind, "elements held", len(case.program), text, ranks=who)
    return None


def _shards(case: Case) -> int:
    return case.world.mesh[-1] if case.world.mesh else case.world.size


def _problems(case: Case, ranks: Sequence[RankObservation]) -> Iterator[tuple[FailureKind, tuple[int, ...], str]]:
    shards = _shards(case)
    sharded = [_sharded(case, rank) for rank in ranks]
    held = [sum(piece.stop - piece.start for each in mine for piece in each.pieces) for mine in sharded]
    total = sum(math.prod(each.shape) for each in sharded[0])
    most = sum(_share(each.shape, shards) for each in sharded[0])
    for rank in (rank for rank, elements in enumerate(held) if elements > most):
        yield (
            FailureKind.KEPT,
            (rank,),
            f"holds {held[rank]:,} (at most {most:,} with padding) of the {total:,} elements",
        )
    # Ranks that hold the other shards of a tensor belong to the same replica.
    of_a_replica = shards * case.world.tensor_parallel if case.world.mesh else len(ranks)
    for first in range(0, len(ranks), of_a_replica):
        together = sum(held[first : first + of_a_replica])
        if together < total:
            yield (
                FailureKind.MISSING,
                tuple(range(first, first + of_a_replica)),
                f"hold {together:,} of the {total:,} elements",
            )


def review_ignored(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the finding that an ignored module is not whole on every rank, with the gradient of this rank's inputs alone.

    The program is one micro-batch, observed before any step.
    """
    (batch,) = (batch for operation in case.program for batch in operation.batches())
    for rank in ranks:
        parameters = rank.snapshots[0].parameters
        # Unobserved quantities are not judged.
        if all(each.grad_pieces is None for each in parameters.values()):
            continue
        own, bound = models.gradients_of_rank(case, batch, rank.rank)
        for fqn, gradient in own.items():
            got = _other_than(gradient, parameters[fqn].grad_pieces or (), bound) if _is_ignored(case, fqn) else ""
            if got:
                quantity = f"gradient of {fqn}"
                statement = f"{quantity}, which is ignored: expected that of rank {rank.rank}'s own inputs, got {got}"
                facts: dict[str, Any] = {"ranks": (rank.rank,), "sort": "gradient", "fqn": fqn, "bound": bound}
                return finding(case, FailureKind.DIVERGED, quantity, 0, statement, **facts)
    return None


def _other_than(gradient: torch.Tensor, pieces: Sequence[ObservedPiece], bound: float) -> str:
    """Return what a rank holds in place of a whole gradient; empty if it holds a whole one."""
    if [(piece.start, piece.stop) for piece in pieces] != [(0, gradient.numel())]:
        held = sum(piece.stop - piece.start for piece in pieces)
        return f"{held:,} of its {gradient.numel():,} elements" if held else "none"
    error = float((pieces[0].value.reshape(-1) - gradient.reshape(-1)).abs().max())
    return "" if error <= bound else f"numbers that are off by {error:.3g} (bound {bound:.3g})"


def _is_ignored(case: Case, fqn: str) -> bool:
    return any(fnmatchcase(fqn, f"{name}.*") for name in case.wrapping.ignored)


def _sharded(case: Case, rank: RankObservation) -> list[ParameterObservation]:
    return [each for each in rank.snapshots[-1].parameters.values() if not _is_ignored(case, each.fqn)]


def _share(shape: Sequence[int], shards: int) -> int:
    """The most that one of `shards` ranks has of a parameter, cut flat or along any dimension."""
    numel = math.prod(shape)
    cuts = [math.ceil(length / shards) * (numel // length) for length in shape if length]
    return min(numel, max(cuts, default=numel) + _PADDING)
