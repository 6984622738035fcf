"""Looks for NaN in what a world computes, and for its reason."""

from __future__ import annotations

import torch

from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.quantities import Kind, Quantities, Quantity
from fsdp_testing.train.running import Failed, Runner, Undecided
from fsdp_testing.train.whole import WholeRun


class ReadTooEarly(Failed):
    """Memory was read before it was written: wrong in any world."""


def check_numbers(runner: Runner, run: WholeRun) -> None:
    """NaN equals nothing, and all NaN look alike: no verdict could be trusted.

    Raises:
        Failed, Undecided: It contains NaN.
    """
    check_waits(runner, run)
    rank, places = _nan_of(run)
    if not places:
        return
    first = f"NaN, first in {places[0]} ({len(places)} in all), so nothing can be compared. "
    if rank is None:
        raise Undecided(f"computes {first}Check it with fewer steps, or other weights.")
    raise Failed(f"returns {first}The loop diverges.", subject=f"rank {rank}")


def check_waits(runner: Runner, run: WholeRun) -> None:
    """Look for the reason in the world's own NaN: what is read too early holds NaN or garbage in our runs.

    Raises:
        ReadTooEarly: The training has no NaN if results are delivered at once, or if fresh memory is not filled.
    """
    rank, places = _nan_of(run)
    if not places:
        return
    subject = "" if rank is None else f"rank {rank}"
    for settings, cause in _READ_TOO_EARLY:
        if not _nan_of(runner.run(run.size, settings))[1]:
            raise ReadTooEarly(f"computes NaN, first in {places[0]}. Cause: {cause}", subject=subject)


_READ_TOO_EARLY = (
    (
        RunSettings(late=False),
        (
            "the result of an asynchronous collective is read before its wait. Until the wait it holds NaN here; delivered at "
            "once, no number is NaN. Wait for the work object of each collective before you read its output."
        ),
    ),
    (
        RunSettings(late=False, garbage=False),
        (
            "uninitialised memory is read. Fresh memory is filled with garbage here; without that, no number is NaN. Write to "
            "what torch.empty returns before you read it."
        ),
    ),
)


def _nan_of(run: WholeRun) -> tuple[int | None, list[str]]:
    """Return where a world has NaN, and the rank if a function returned it."""
    for rank, report in enumerate(run.ranks):
        if places := _nan(returned(report.returned)):
            return rank, places
    return None, _nan(run.quantities)


def returned(values: dict[str, list[torch.Tensor]]) -> Quantities:
    """Return what a function returned as quantities."""
    return {Quantity(Kind.RETURNED, name): steps for name, steps in values.items()}


def _nan(quantities: Quantities) -> list[str]:
    return [
        f"{key} at step {step}" if len(values) > 1 else str(key)
        for key, values in quantities.items()
        for step, value in enumerate(values)
        if bool(value.isnan().any())
    ]
