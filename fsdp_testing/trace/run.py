"""What is the history of a case on an implementation? Asked of a world, given back as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import WorldFailed
from fsdp_testing.implementations import registry
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.pool import WorldOutcome
from fsdp_testing.records import Case, RankObservation
from fsdp_testing.records.event import History
from fsdp_testing.trace import job

OnRanks = Callable[..., list[Any]]
"""Calls a function with arguments on `size` ranks and returns what each gave, as `CaseRunner.on_ranks` does."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one case, the units (FQN, parameter FQNs) in the implementation's order by rank, and what each saw."""

    implementation: str
    case: Case
    history: History
    units: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]
    observations: tuple[RankObservation, ...] = ()


def trace(name: str, case: Case, on_ranks: OnRanks | None = None) -> Trace:
    """Run `case` through implementation `name` and return what every rank did.

    Args:
        name: Implementation.
        case: The case.
        on_ranks: Runs it; by default on the pool of this process.

    Raises:
        WorldFailed: The case did not run to its end on every rank; the message is the account of every rank.
    """
    on_ranks = on_ranks or CaseRunner().on_ranks
    try:
        traces = on_ranks(job.trace_case, registry.adapter_of(name), case, size=case.world.size)
    except WorldFailed as failed:
        if isinstance(failed.outcome, WorldOutcome):
            raise _failed(name, case, failed.outcome) from failed
        raise
    history = History(tuple(traced.events for traced in traces))
    observations = tuple(traced.observation for traced in traces)
    return Trace(name, case, history, tuple(traced.units for traced in traces), observations)


def _failed(name: str, case: Case, outcome: WorldOutcome) -> WorldFailed:
    errors = [r.value.observation.error for r in outcome.ranks if isinstance(r.value, job.RankTrace)]
    text = "\n".join(f"{error.type_name}: {error.message}" for error in errors if error is not None)
    return WorldFailed(f"{name} did not run {case.identity} to its end: {text or outcome.describe()}", outcome)
