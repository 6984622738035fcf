"""Parameters under several names, and modules that are called more than once."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Builder, Check, Place, Suite
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch


def _trained(model: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        yield place.case(model, *iterations(3), optimizer=ADAMW)
        yield place.case(model, micro_batch(0), Observe(), Step(), ZeroGrad(False), micro_batch(1), Step())

    return build


SUITE = Suite()


SUITE.add(
    Check(
        "shared.within_a_unit",
        "A parameter under two names gets the gradient of both uses and stays one parameter.",
        "pytorch PR 98912, 99448",
        _trained("tied_within"),
        frozenset({"shared_parameters"}),
    )
)


SUITE.add(
    Check(
        "shared.across_units",
        "A parameter used by two units gets the gradient of both and stays one parameter.",
        "pytorch issue 83052; torchtitan 2817",
        _trained("tied_across"),
        frozenset({"shared_parameters", "shared_across_units"}),
    )
)


SUITE.add(
    Check(
        "shared.module_called_twice",
        "A unit called twice in a forward gets the gradient of both calls.",
        "fairscale PR 784, 513",
        _trained("called_twice"),
        frozenset({"reused_modules"}),
    )
)


SUITE.add(
    Check(
        "shared.module_registered_twice",
        "A unit under two names is one unit.",
        "pytorch PR 98912",
        _trained("registered_twice"),
        frozenset({"shared_parameters", "reused_modules"}),
    )
)


@SUITE.check(
    "shared.accumulated",
    source="pytorch PR 98912, 124193",
    needs=frozenset({"shared_parameters", "reused_modules", "no_sync"}),
)
def _accumulated(place: Place) -> Iterable[Case]:
    """Shared parameters and repeated units accumulate over micro-batches."""
    for model in ("tied_within", "called_twice"):
        yield place.case(model, *accumulated(0, 1, 2), Observe(), Step())
