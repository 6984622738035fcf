"""Prefetch: when a unit is gathered is no matter to the numbers."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.suites.check import PLAIN_SGD, Check, Place
from fsdp_testing.suites.schedules import accumulated, forward, iteration, iterations, micro_batch
from fsdp_testing.zoo import MODELS

_NEEDS = frozenset({"prefetch"})


def _plan(model: str, backward: str, *, forward: bool) -> WrappingPlan:
    return WrappingPlan(MODELS[model].units, forward_prefetch=forward, backward_prefetch=backward)


def _every_kind(place: Place) -> Iterable[Case]:
    for backward, ahead in (("pre", True), ("post", False), ("none", False)):
        yield place.case("mlp", *iterations(2), wrapping=_plan("mlp", backward, forward=ahead))


def _order_changes(place: Place) -> Iterable[Case]:
    # What was prefetched by the order of the last iteration may not be wanted in this one.
    none, all_of_it = ((False, False, False),), ((True, True, True),)
    program = (
        *iteration(0, usage=all_of_it),
        *iteration(1, usage=none),
        forward(2, "no_grad", usage=none),
        micro_batch(3, usage=all_of_it),
        Observe(),
        Step(),
    )
    yield place.case("conditional", *program, wrapping=_plan("conditional", "pre", forward=True), optimizer=PLAIN_SGD)


def _accumulated(place: Place) -> Iterable[Case]:
    program = (*accumulated(0, 1, 2), Step(), ZeroGrad(), *iterations(1, first=3))
    yield place.case("deep_nest", *program, wrapping=_plan("deep_nest", "post", forward=True))


CHECKS = (
    Check(
        "prefetch.every_kind",
        "Gathering units ahead, in forward and in backward, changes no number.",
        "PyTorch FSDP, VLDB 2023, section 3.3.2: prefetching",
        _every_kind,
        _NEEDS,
    ),
    Check(
        "prefetch.order_changes",
        "A unit gathered ahead that the pass then skips is neither stale nor lost later.",
        "pytorch PR 110139",
        _order_changes,
        _NEEDS | {"unused_parameters", "forward_only"},
        # Whether an unused parameter has zeros or no gradient is a check of its own.
        Comparison(none_is_zero=True),
    ),
    Check(
        "prefetch.accumulated",
        "Prefetching in micro-batches inside and outside no_sync changes no number.",
        "pytorch PR 84085",
        _accumulated,
        _NEEDS | {"no_sync"},
    ),
)
