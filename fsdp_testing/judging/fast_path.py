"""Clears cases that are beyond doubt: a comparison that is quick to say yes and never says it wrongly.

Most cases agree with the oracle to the bit or nearly so. One undisturbed replay is enough to see that: it has no bounds
of its own, so that each quantity gets one which is smaller than that of the full comparison everywhere. What passes is
right; whatever does not is left to the full comparison, which alone may call something a divergence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fsdp_testing.cases.records import UNIT_ROUNDOFF, RankObservation
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.models import dtype_name
from fsdp_testing.oracle.oracle import point_of
from fsdp_testing.oracle.quantities import Expectation, Expected
from fsdp_testing.oracle.replay import Replay

ROUNDINGS = 12
"""Fewer than `oracle.roundings_of` gives for any case: ranks, micro-batches, and at least one layer with its rows."""


def fast_path_agrees(replay: Replay, ranks: Sequence[RankObservation], comparison: Comparison = Comparison()) -> int:
    """Return how many tensors were compared if everything agrees beyond doubt, and -1 if not.

    Args:
        replay: The undisturbed oracle's, when it has run.
        ranks: What each rank reports, by rank.
        comparison: Which kinds to compare, and whether a gradient of zeros may stand for None.
    """
    # The comparison ends before the operation that raised, and would clear what it has not seen.
    if any(rank.error is not None for rank in ranks):
        return -1
    tally = agreement.compare(_expectation(replay), ranks, comparison)
    return -1 if tally.divergences or tally.undecided else tally.comparisons


@functools.lru_cache(maxsize=16)  # of one replay many cases are compared with
def _expectation(replay: Replay) -> Expectation:
    points = tuple(
        point_of(point, {quantity: _closely(value) for quantity, value in point.values.items()})
        for point in replay.points
    )
    return Expectation(points, replay.shapes)


def _closely(value: torch.Tensor | None) -> Expected:
    if value is None or not value.numel() or not value.is_floating_point():
        return Expected(value)
    largest = float(value.abs().max())
    # Numbers that are not finite are to be the same.
    return Expected(
        value, ROUNDINGS * UNIT_ROUNDOFF[dtype_name(value.dtype)] * largest if math.isfinite(largest) else 0.0
    )
