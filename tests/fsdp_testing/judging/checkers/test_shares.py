"""What ranks hold right after wrapping is their share: no rank holds more, and a replica is whole."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.records import (
    Case,
    ModelSpec,
    ObservedPiece,
    ParameterObservation,
    RankObservation,
    Snapshot,
    WorldSpec,
)
from fsdp_testing.judging.checkers.shares import review
from fsdp_testing.oracle.quantities import Expectation

FULL, HYBRID = WorldSpec(2), WorldSpec(4, mesh=(2, 2))


def said(world, *spans):
    """What is said of a parameter of 40 by 4, of which each rank holds one span."""
    ranks = []
    for rank, (start, stop) in enumerate(spans):
        piece = ObservedPiece(start, stop, torch.zeros(stop - start))
        held = ParameterObservation("layers.0.weight", (40, 4), "float32", True, (piece,), None, None)
        ranks.append(RankObservation(rank, snapshots=(Snapshot(0, "end", {held.fqn: held}, {}),)))
    strategy = "hybrid_shard" if world.mesh else "full_shard"
    finding = review(Case(ModelSpec("mlp"), world, (), strategy=strategy), ranks, Expectation((), {}))
    return "" if finding is None else f"{finding.kind}: {finding.statement}"


@pytest.mark.parametrize(
    ("world", "spans", "text"),
    [
        (FULL, [(0, 80), (80, 160)], ""),
        (FULL, [(0, 96), (96, 160)], ""),  # padding for alignment
        (
            FULL,
            [(0, 160), (0, 160)],
            "kept: rank 0 holds 160 (at most 96 with padding) of the 160 elements of a replica",
        ),
        (FULL, [(0, 40), (40, 160)], "kept: rank 1 holds 120"),
        (HYBRID, [(0, 80), (80, 160)] * 2, ""),
        (
            HYBRID,
            [(0, 40), (40, 80), (80, 120), (120, 160)],
            "missing: ranks 0 and 1 hold 80 of the 160 elements of a replica",
        ),
        (HYBRID, [(0, 80), (80, 160), (0, 160), (0, 0)], "kept: rank 2 holds 160"),
    ],
)
def test_more_or_less_than_a_share(world, spans, text):
    assert said(world, *spans).startswith(text) if text else said(world, *spans) == ""
