"""Parameters that an iteration does not use: on no rank, on some ranks, in some iterations."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import Case, Observe, Operation, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import iteration, iterations, micro_batch, no_sync_batch
from fsdp_testing.oracle.comparison import Comparison

# Plain SGD makes no difference between None and zeros; whether there is one is a check of its own.
_LENIENT = Comparison(none_is_zero=True)

_ALL = (True, True, True)
_FIRST = (True, False, False)
_NONE = (False, False, False)


def _using(*usages: tuple[tuple[bool, ...], ...]) -> list[Operation]:
    """Return an iteration for each usage: one mask for all ranks, or one per rank."""
    return [op for seed, usage in enumerate(usages) for op in iteration(seed, usage=usage)]


SUITE = Suite()


@SUITE.check("unused.never", source="pytorch issue 83107, PR 83195", comparison=_LENIENT)
def _never(place: Place) -> Iterable[Case]:
    """Parameters that no iteration uses do not move, and the others train."""
    yield place.case("conditional", *iterations(2, usage=(_ALL,)), optimizer=PLAIN_SGD)
    yield place.case("unused_output", *iterations(2), optimizer=PLAIN_SGD)


@SUITE.check("unused.sometimes", source="pytorch issue 83129, PR 80245", comparison=_LENIENT)
def _sometimes(place: Place) -> Iterable[Case]:
    """Parameters used in some iterations only get their gradient in those."""
    yield place.case("conditional", *_using((_ALL,), (_FIRST,), (_NONE,), (_ALL,)), optimizer=PLAIN_SGD)
    masks = ((True, False), (False, True), (False, False), (True, True))
    yield place.case("partly_used", *_using(*((mask,) for mask in masks)), optimizer=PLAIN_SGD)


@SUITE.check("unused.in_accumulation", source="pytorch issue 69031, PR 124193", comparison=_LENIENT)
def _in_accumulation(place: Place) -> Iterable[Case]:
    """A parameter that only a local micro-batch used is reduced with the others."""
    local = (no_sync_batch(0, usage=(_ALL,)), no_sync_batch(1, usage=(_FIRST,)))
    program = (*local, *iteration(2, Observe(), usage=(_NONE,)), *iteration(3, usage=(_ALL,)))
    yield place.case("conditional", *program, optimizer=PLAIN_SGD)
    first = (no_sync_batch(0, usage=((True, False),)), micro_batch(1, usage=((False, True),)))
    program = (*first, Step(), ZeroGrad(False), *iteration(2, usage=((False, False),)))
    yield place.case("partly_used", *program, optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.units_differ_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    comparison=_LENIENT,
)
def _differ(place: Place) -> Iterable[Case]:
    """Ranks may run different units: each counts with zeros where it did not."""
    masks = ((_ALL, _FIRST), (_FIRST, _NONE), (_NONE, _ALL))
    yield place.case("conditional", *_using(*masks), optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.parameters_differ_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    comparison=_LENIENT,
)
def _differ_in_unit(place: Place) -> Iterable[Case]:
    """Inside a unit that every rank runs, ranks may use different parameters."""
    masks = (((True, False), (False, True)), ((True, True), (False, False)))
    yield place.case("partly_used", *_using(*masks), optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.units_swapped_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    comparison=_LENIENT,
)
def _swapped(place: Place) -> Iterable[Case]:
    """Ranks may run different units of equal size: neither gets the other's gradient."""
    usage = ((True, False, False), (False, True, False))
    yield place.case("conditional", *_using(usage, usage), optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.parameters_swapped_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    comparison=_LENIENT,
)
def _swapped_in_unit(place: Place) -> Iterable[Case]:
    """Of parameters of equal size in one unit ranks may use different ones: neither gets the other's gradient."""
    usage = ((True, False), (False, True))
    yield place.case("partly_used", *_using(usage, usage), optimizer=PLAIN_SGD, wrapping=WrappingPlan())


@SUITE.check(
    "unused.gradient_is_none",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs={"unused_gradient_is_none"},
)
def _is_none(place: Place) -> Iterable[Case]:
    """A parameter that no rank used keeps gradient None: weight decay and momentum leave it alone."""
    yield place.case("conditional", *_using((_ALL,), (_FIRST,), (_NONE,), (_ALL,)), optimizer=ADAMW)
    masks_in_unit = ((True, False), (False, False), (True, True))
    yield place.case("partly_used", *_using(*((mask,) for mask in masks_in_unit)), optimizer=ADAMW)
