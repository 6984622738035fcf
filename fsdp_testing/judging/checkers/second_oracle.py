"""Compares an implementation with DDP on the same ranks. Pure: a second oracle, beside the single process.

The first oracle replays the program in one process, with code of this project. DDP on the same ranks shares none of
that code, and knows neither shards nor units. Both are right within the oracle's bound, so they are within twice that
bound of one another; where DDP gave nothing, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import Case, Finding, RankObservation
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.oracle import gathered_state
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.quantities import Expectation, Expected, ExpectedPoint, Quantity

TWICE = "twice the oracle's bound, since both are within it: "


@dataclass(frozen=True, slots=True)
class PairedObservation(RankObservation):
    """What a rank reports that ran the case a second time, with DDP.

    Attributes:
        other: What it reported then.
        gradients: Whether the implementation shows gradients.
    """

    other: RankObservation | None = None
    gradients: bool = True


def review_pair(case: Case, ranks: Sequence[RankObservation], expectation: Expectation) -> Finding | None:
    """Compare what the ranks hold with what DDP held at the same points.

    Raises:
        HarnessError: DDP did not run the case, so that there is no second oracle; that is nobody's failure but ours.
    """
    references = [rank.other for rank in ranks if isinstance(rank, PairedObservation) and rank.other is not None]
    # Of a second oracle that fails nothing follows for the implementation.
    wrong = tuple(rank.rank for rank in references if rank.error is not None)
    if len(references) != len(ranks) or wrong:
        got = next((rank.error.message for rank in references if rank.error is not None), "it reported nothing")
        raise HarnessError(f"second oracle: expected DDP to run {case.identity}, got {got}. Run the case by itself.")
    states = gathered_state.states(references)
    points = tuple(_point(point, states[point.index]) for point in expectation.points if point.index in states)
    if expectation.notes.get("mode") == "lockstep":
        # Each bound is that of one operation, from the implementation's own state: DDP's is the same before the first.
        points = tuple(point for point in points if point.snapshot)[:1]
    shown = all(rank.gradients for rank in ranks if isinstance(rank, PairedObservation))
    due, comparison = replace(expectation, points=points), Comparison(outputs=False, gradients=shown)
    finding, tally = agreement.review(case, due, ranks, comparison, "compared with DDP on the same ranks")
    if not tally.comparisons:
        raise HarnessError(
            f"second oracle: expected something to compare in {case.identity}, got nothing. Observe more."
        )
    return finding


def _point(point: ExpectedPoint, state: gathered_state.GatheredState) -> ExpectedPoint:
    quantities: dict[Quantity, Expected] = {}
    for quantity, expected in point.quantities.items():
        values = {"value": state.values, "gradient": state.gradients}.get(quantity.kind)
        value = None if values is None else values.get(quantity.name)
        if value is not None and expected.value is not None:
            why = TWICE + (expected.derivation or "bitwise")
            quantities[quantity] = Expected(value, 2 * expected.bound, why)
    return replace(point, quantities=quantities)
