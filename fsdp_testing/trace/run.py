"""What is the history of a case on an implementation? Asked of a world, given back as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import WorldFailed
from fsdp_testing.implementations import registry
from fsdp_testing.pool import Pool, WorldOutcome, default_pool
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


def trace(name: str, case: Case, *, pool: Pool | None = None, timeout: float = 60.0) -> Trace:
    """Run `case` through implementation `name` on a pooled world and return what every rank did.

    Raises:
        WorldFailed: the case did not run to its end on every rank; the message is the account of every rank.
    """
    adapter = registry.adapter_of(name)
    lender = pool or default_pool()
    world = lender.world(case.world.size, case.world.backend)
    try:
        outcome = world.execute(job.trace_case, (adapter, case), timeout=timeout, name=f"trace {name} {case.identity}")
    finally:
        world.release()
    if not outcome.ok:
        raise _failed(name, case, outcome)
    return _trace_of(name, case, [rank.value for rank in outcome.ranks])


def trace_on(on_ranks: OnRanks, name: str, case: Case) -> Trace:
    """Trace on ranks that somebody else lends; raises like `trace`."""
    try:
        return _trace_of(name, case, on_ranks(job.trace_case, registry.adapter_of(name), case, size=case.world.size))
    except WorldFailed as failed:
        if isinstance(failed.outcome, WorldOutcome):
            raise _failed(name, case, failed.outcome) from failed
        raise


def _trace_of(name: str, case: Case, traces: Sequence[job.RankTrace]) -> Trace:
    history = History(tuple(traced.events for traced in traces))
    observations = tuple(traced.observation for traced in traces)
    return Trace(name, case, history, tuple(traced.units for traced in traces), observations)


def _failed(name: str, case: Case, outcome: WorldOutcome) -> WorldFailed:
    errors = [r.value.observation.error for r in outcome.ranks if isinstance(r.value, job.RankTrace)]
    text = "\n".join(f"{error.type_name}: {error.message}" for error in errors if error is not None)
    return WorldFailed(f"{name} did not run {case.identity} to its end: {text or outcome.describe()}", outcome)
