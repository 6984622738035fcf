"""Runs a function on N ranks without pytest: `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_testing.base import env
from fsdp_testing.errors import BackendUnavailable, WorldFailed
from fsdp_testing.ranks.faults.fault import Fault
from fsdp_testing.ranks.faults.injection import inject
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.ranks.pool.attachment import run_attached
from fsdp_testing.ranks.pool.controller import unavailable_reason
from fsdp_testing.ranks.pool.outcome import WorldOutcome
from fsdp_testing.ranks.pool.world import current_world, inside_rank

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames


def run_ranks(
    function: Callable[..., Any] | str,
    *args: Any,
    size: int = 2,
    backend: str = "gloo",
    timeout: float | None = 60.0,
    isolation: str = "warm",
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `size` ranks and return one result per rank.

    Inside, torch's default process group is the world's, and `fsdp_testing.current_world()` is the rank's view of it. Ranks
    are kept for the next call unless `isolation="fresh"`. Under torchrun (`RANK` and `WORLD_SIZE` set) its processes are the
    world instead: each calls the function once, all get the results, and the deadline is torchrun's.

    Args:
        function: Importable by name (module level), or "package.module:function".
        args: Picklable; tensors travel as CPU tensors.
        size: Number of ranks.
        backend: "gloo", "nccl", "fake" or a registered one.
        timeout: Seconds until a rank counts as hung; None waits forever.
        isolation: "warm" or "fresh".
        kwargs: Like `args`.

    Returns:
        Results by rank.

    Raises:
        WorldFailed: A rank raised, died, hung or disagreed; the message describes every rank, and the attribute `outcome` has
            the same as data.
        InvalidArgument, UnsendableFunction, BackendUnavailable: Before anything runs.
    """
    launch = env.torchrun()
    # A pooled rank may have the environment of a controller under torchrun.
    if launch is not None and not (inside_rank() and current_world().pooled):
        return run_attached(launch, function, (args, kwargs), size, backend)
    pool = default_pool()
    with pool.lend(size, backend, isolation) as world:
        outcome = world.execute(function, args, kwargs, timeout=timeout)
    raise_unless_ok(outcome)
    return outcome.values


def run_with_faults(faults: Sequence[Fault], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on this rank with faults; its standard error tells which were reached (`Fault.reached_in`).

    Collectives: those of the function.
    """
    injection = inject(faults, current_world().rank)
    try:
        return function(*args)
    finally:
        injection.end()


def raise_unless_ok(outcome: WorldOutcome) -> None:
    """Raise `WorldFailed` (or `BackendUnavailable`) unless every rank returned."""
    if outcome.ok:
        return
    reason = unavailable_reason(outcome)
    if reason:
        raise BackendUnavailable(reason)
    raise WorldFailed(outcome.describe(), outcome)
