"""What is the history of a case on an implementation? Asked of a world, given back as one value."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.errors import WorldFailed
from fsdp_testing.pool import Pool, default_pool
from fsdp_testing.records import Case
from fsdp_testing.records.history import History
from fsdp_testing.trace import job


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one case, and the units (FQN, parameter FQNs) in the implementation's order, by rank."""

    implementation: str
    case: Case
    history: History
    units: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]


def trace(name: str, case: Case, *, pool: Pool | None = None, timeout: float = 60.0) -> Trace:
    """Run `case` through implementation `name` on a pooled world and return what every rank did.

    Raises:
        WorldFailed: the case did not run to its end on every rank; the message is the account of every rank.
    """
    lender = pool or default_pool()
    world = lender.world(case.world.size, case.world.backend)
    try:
        outcome = world.execute(job.trace_case, (name, case), timeout=timeout, name=f"trace {name} {case.identity}")
    finally:
        world.release()
    if not outcome.ok:
        errors = [r.value.observation.error for r in outcome.ranks if isinstance(r.value, job.RankTrace)]
        told = "\n".join(f"{error.type_name}: {error.message}" for error in errors if error is not None)
        raise WorldFailed(f"{name} did not run {case.identity} to its end: {told or outcome.describe()}", outcome)
    traces = [rank.value for rank in outcome.ranks]
    history = History(tuple(traced.events for traced in traces))
    return Trace(name, case, history, tuple(traced.units for traced in traces))
