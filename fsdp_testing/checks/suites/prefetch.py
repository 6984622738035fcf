"""Prefetch: when a unit is gathered is no matter to the numbers."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import Case, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, iterations, micro_batch
from fsdp_testing.oracle.comparison import Comparison


def _plan(model: str, backward: str, *, forward: bool) -> WrappingPlan:
    return WrappingPlan(MODELS[model].units, forward_prefetch=forward, backward_prefetch=backward)


SUITE = Suite()


@SUITE.check("prefetch.every_kind", source="PyTorch FSDP, VLDB 2023, section 3.3.2: prefetching")
def _every_kind(place: Place) -> Iterable[Case]:
    """Gathering units ahead, in forward and in backward, changes no number."""
    for backward, ahead in (("pre", True), ("post", False), ("none", False)):
        yield place.case("mlp", *iterations(2), wrapping=_plan("mlp", backward, forward=ahead))


@SUITE.check("prefetch.order_changes", source="pytorch PR 110139", comparison=Comparison(none_is_zero=True))
def _order_changes(place: Place) -> Iterable[Case]:
    """A unit gathered ahead that the pass then skips is neither stale nor lost later."""
    # What was prefetched by the order of the last iteration may not be wanted in this one.
    none, all_of_it = ((False, False, False),), ((True, True, True),)
    first = (*iteration(0, usage=all_of_it), *iteration(1, usage=none), forward(2, "no_grad", usage=none))
    program = (*first, micro_batch(3, usage=all_of_it), Observe(), Step())
    yield place.case("conditional", *program, wrapping=_plan("conditional", "pre", forward=True), optimizer=PLAIN_SGD)


@SUITE.check("prefetch.accumulated", source="pytorch PR 84085")
def _accumulated(place: Place) -> Iterable[Case]:
    """Prefetching in micro-batches inside and outside no_sync changes no number."""
    program = (*accumulated(0, 1, 2), Step(), ZeroGrad(), *iteration(3))
    yield place.case("deep_nest", *program, wrapping=_plan("deep_nest", "post", forward=True))
