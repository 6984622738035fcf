"""Parameters under several names, and modules that are called more than once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iterations, micro_batch


def _trained(model: str, place: Place) -> Iterable[Case]:
    yield place.case(model, *iterations(3), optimizer=ADAMW)
    yield place.case(model, micro_batch(0), Observe(), Step(), ZeroGrad(False), micro_batch(1), Step())


SUITE = Suite()

SUITE.add(
    "shared.within_a_unit",
    "A parameter under two names gets the gradient of both uses and stays one parameter.",
    partial(_trained, "tied_within"),
    source="pytorch PR 98912, 99448",
)
SUITE.add(
    "shared.across_units",
    "A parameter used by two units gets the gradient of both and stays one parameter.",
    partial(_trained, "tied_across"),
    source="pytorch issue 83052; torchtitan 2817",
)
SUITE.add(
    "shared.module_called_twice",
    "A unit called twice in a forward gets the gradient of both calls.",
    partial(_trained, "called_twice"),
    source="fairscale PR 784, 513",
)
SUITE.add(
    "shared.module_registered_twice",
    "A unit under two names is one unit.",
    partial(_trained, "registered_twice"),
    source="pytorch PR 98912",
)


@SUITE.check("shared.accumulated", source="pytorch PR 98912, 124193")
def _accumulated(place: Place) -> Iterable[Case]:
    """Shared parameters and repeated units accumulate over micro-batches."""
    for model in ("tied_within", "called_twice"):
        yield place.case(model, *accumulated(0, 1, 2), Observe(), Step())
