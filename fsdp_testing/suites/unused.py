"""Parameters that an iteration does not use: on no rank, on some ranks, in some iterations."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.suites.schedules import iteration, iterations, micro_batch, no_sync_batch

_NEEDS = frozenset({"unused_parameters"})
_DIFFER = _NEEDS | {"unused_parameters_differ"}
# Plain SGD makes no difference between None and zeros; whether there is one is a check of its own.
_LENIENT = Comparison(none_is_zero=True)

_ALL = (True, True, True)
_FIRST = (True, False, False)
_NONE = (False, False, False)


SUITE = Suite()


@SUITE.check("unused.never", source="pytorch issue 83107, PR 83195", needs=_NEEDS, comparison=_LENIENT)
def _never(place: Place) -> Iterable[Case]:
    """Parameters that no iteration uses do not move, and the others train."""
    yield place.case("conditional", *iterations(2, usage=(_ALL,)), optimizer=PLAIN_SGD)
    yield place.case("unused_output", *iterations(2), optimizer=PLAIN_SGD)


@SUITE.check("unused.sometimes", source="pytorch issue 83129, PR 80245", needs=_NEEDS, comparison=_LENIENT)
def _sometimes(place: Place) -> Iterable[Case]:
    """Parameters used in some iterations only get their gradient in those."""
    program = [op for seed, mask in enumerate((_ALL, _FIRST, _NONE, _ALL)) for op in iteration(seed, usage=(mask,))]
    yield place.case("conditional", *program, optimizer=PLAIN_SGD)
    masks = ((True, False), (False, True), (False, False), (True, True))
    program = [op for seed, mask in enumerate(masks) for op in iteration(seed, usage=(mask,))]
    yield place.case("partly_used", *program, optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.in_accumulation", source="pytorch issue 69031, PR 124193", needs=_NEEDS | {"no_sync"}, comparison=_LENIENT
)
def _in_accumulation(place: Place) -> Iterable[Case]:
    """A parameter that only a local micro-batch used is reduced with the others."""
    program = (
        no_sync_batch(0, usage=(_ALL,)),
        no_sync_batch(1, usage=(_FIRST,)),
        micro_batch(2, usage=(_NONE,)),
        Observe(),
        Step(),
        ZeroGrad(),
    )
    yield place.case("conditional", *program, *iteration(3, usage=(_ALL,)), optimizer=PLAIN_SGD)
    first = (no_sync_batch(0, usage=((True, False),)), micro_batch(1, usage=((False, True),)))
    yield place.case(
        "partly_used", *first, Step(), ZeroGrad(False), *iteration(2, usage=((False, False),)), optimizer=PLAIN_SGD
    )


@SUITE.check(
    "unused.units_differ_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs=_DIFFER,
    comparison=_LENIENT,
)
def _differ(place: Place) -> Iterable[Case]:
    """Ranks may run different units: each counts with zeros where it did not."""
    masks = ((_ALL, _FIRST), (_FIRST, _NONE), (_NONE, _ALL))
    program = [op for seed, mask in enumerate(masks) for op in iteration(seed, usage=mask)]
    yield place.case("conditional", *program, optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.parameters_differ_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs=_DIFFER,
    comparison=_LENIENT,
)
def _differ_in_unit(place: Place) -> Iterable[Case]:
    """Inside a unit that every rank runs, ranks may use different parameters."""
    masks = (((True, False), (False, True)), ((True, True), (False, False)))
    program = [op for seed, mask in enumerate(masks) for op in iteration(seed, usage=mask)]
    yield place.case("partly_used", *program, optimizer=PLAIN_SGD)


@SUITE.check(
    "unused.units_swapped_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs=_DIFFER,
    comparison=_LENIENT,
)
def _swapped(place: Place) -> Iterable[Case]:
    """Ranks may run different units of equal size: neither gets the other's gradient."""
    mask = ((True, False, False), (False, True, False))
    yield place.case(
        "conditional", *(op for seed in range(2) for op in iteration(seed, usage=mask)), optimizer=PLAIN_SGD
    )


@SUITE.check(
    "unused.parameters_swapped_between_ranks",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs=_DIFFER,
    comparison=_LENIENT,
)
def _swapped_in_unit(place: Place) -> Iterable[Case]:
    """Of parameters of equal size in one unit ranks may use different ones: neither gets the other's gradient."""
    program = [op for seed in range(2) for op in iteration(seed, usage=((True, False), (False, True)))]
    yield place.case("partly_used", *program, optimizer=PLAIN_SGD, wrapping=WrappingPlan())


@SUITE.check(
    "unused.gradient_is_none",
    source="torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
    needs=_NEEDS | {"unused_gradient_is_none"},
)
def _is_none(place: Place) -> Iterable[Case]:
    """A parameter that no rank used keeps gradient None: weight decay and momentum leave it alone."""
    masks = (_ALL, _FIRST, _NONE, _ALL)
    program = [op for seed, mask in enumerate(masks) for op in iteration(seed, usage=(mask,))]
    yield place.case("conditional", *program, optimizer=ADAMW)
    masks_in_unit = ((True, False), (False, False), (True, True))
    program = [op for seed, mask in enumerate(masks_in_unit) for op in iteration(seed, usage=(mask,))]
    yield place.case("partly_used", *program, optimizer=ADAMW)
