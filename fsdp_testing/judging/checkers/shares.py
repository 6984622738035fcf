"""How many elements of the parameters a rank holds: right numbers do not show an implementation that never shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, FailureKind, Finding, ParameterObservation, RankObservation
from fsdp_testing.judging.checkers.explain import finding, ranks_text
from fsdp_testing.oracle import models
from fsdp_testing.oracle.quantities import Expectation

_PADDING = 16
"""Elements of a parameter that alignment may move from one rank to another."""


def review(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the finding that ranks hold more or less than their share when nothing is gathered, as right after wrapping.

    The ranks of one replica hold every element together; none of them holds more than its part, with padding.
    """
    for who, statement in _problems(case, ranks):
        text = f"{ranks_text(who)} {statement} of a replica, which {case.strategy} divides by {_shards(case)}"
        return finding(case, FailureKind.KEPT, "elements held", len(case.program), text, ranks=who)
    return None


def _shards(case: Case) -> int:
    return case.world.mesh[-1] if case.world.mesh else case.world.size


def _problems(case: Case, ranks: Sequence[RankObservation]) -> Iterator[tuple[tuple[int, ...], str]]:
    shards = _shards(case)
    sharded = [_sharded(case, rank) for rank in ranks]
    held = [sum(piece.stop - piece.start for each in mine for piece in each.pieces) for mine in sharded]
    total = sum(math.prod(each.shape) for each in sharded[0])
    most = sum(_share(each.shape, shards) for each in sharded[0])
    for rank in (rank for rank, elements in enumerate(held) if elements > most):
        yield (rank,), f"holds {held[rank]:,} (at most {most:,} with padding) of the {total:,} elements"
    for first in range(0, len(ranks), shards):
        together = sum(held[first : first + shards])
        if together < total:
            yield tuple(range(first, first + shards)), f"hold {together:,} of the {total:,} elements"


def review_ignored(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the finding that an ignored module is not whole on every rank, with the gradient of this rank's inputs alone.

    The program is one micro-batch, observed before any step.
    """
    (batch,) = (batch for operation in case.program for batch in operation.batches())
    for rank in ranks:
        model = models.build_model(case)
        models.forward(model, case, batch, rank.rank, models.make_inputs(case, batch, rank.rank)).loss.backward()
        own = {
            fqn: p.grad.reshape(-1)
            for fqn, p in model.named_parameters()
            if p.grad is not None and _is_ignored(case, fqn)
        }
        # Inner products in another order.
        bound = 64 * UNIT_ROUNDOFF[case.model.dtype] * max(float(gradient.abs().max()) for gradient in own.values())
        for fqn, gradient in own.items():
            held = rank.snapshots[0].parameters.get(fqn)
            pieces = () if held is None else held.grad_pieces or ()
            values = [piece.value.reshape(-1) for piece in pieces if (piece.start, piece.stop) == (0, gradient.numel())]
            if len(values) != 1 or not float((values[0] - gradient).abs().max()) <= bound:
                statement = (
                    f"ignored {fqn} has not the whole gradient of rank {rank.rank}'s own inputs, and nothing else"
                )
                quantity = f"gradient of {fqn}"
                return finding(
                    case, FailureKind.DIVERGED, quantity, 0, statement, ranks=(rank.rank,), sort="gradient", fqn=fqn
                )
    return None


def _is_ignored(case: Case, fqn: str) -> bool:
    return any(fnmatchcase(fqn, f"{name}.*") for name in case.wrapping.ignored)


def _sharded(case: Case, rank: RankObservation) -> list[ParameterObservation]:
    return [each for each in rank.snapshots[-1].parameters.values() if not _is_ignored(case, each.fqn)]


def _share(shape: Sequence[int], shards: int) -> int:
    """The most that one of `shards` ranks has of a parameter, cut flat or along any dimension."""
    numel = math.prod(shape)
    cuts = [math.ceil(length / shards) * (numel // length) for length in shape if length]
    return min(numel, max(cuts, default=numel) + _PADDING)
