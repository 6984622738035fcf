"""Exceptions: after the user's own code raised, one ordinary iteration is an ordinary iteration."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Batch, Case, Interrupt, Observe, Step
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iteration, iterations, micro_batch


def _raised(seed: int, place: int, *, backward: bool = False, where: str = "step") -> Interrupt:
    return Interrupt(Batch(seed), place, backward, where)


def _in_a_pass(place: Place, *, backward: bool) -> Iterable[Case]:
    # Before the first pass has ever ended, and in the middle of training; at the first module and at the last.
    yield place.case("mlp", _raised(9, 0, backward=backward), *iterations(2), optimizer=ADAMW)
    for at in (0, 2):
        program = (*iteration(0), _raised(9, at, backward=backward), *iterations(2, first=1))
        yield place.case("deep_nest", *program, optimizer=ADAMW)


SUITE = Suite(source="what a pass changed is put back on every way out of it")

SUITE.add(
    "exceptions.in_forward",
    "After an exception in a forward, training goes on as if it had not begun.",
    partial(_in_a_pass, backward=False),
)
SUITE.add(
    "exceptions.in_backward",
    "After an exception in a backward and zero_grad, training goes on as if neither had been.",
    partial(_in_a_pass, backward=True),
)


@SUITE.check("exceptions.in_no_sync", source="contextlib: the exit runs on every way out")
def _in_no_sync(place: Place) -> Iterable[Case]:
    """An exception inside no_sync ends it: the next iteration reduces."""
    for backward in (False, True):
        raised = _raised(9, 1, backward=backward, where="no_sync")
        yield place.case("mlp", *iteration(0), raised, *iteration(1, Observe()), *accumulated(2, 3), Step())


@SUITE.check("exceptions.in_summon", source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params")
def _in_summon(place: Place) -> Iterable[Case]:
    """An exception while full parameters are gathered releases them."""
    first, second = (_raised(seed, 0, where="summon") for seed in (9, 8))
    yield place.case("mlp", first, *iteration(0), second, micro_batch(1), Step())


@SUITE.check("exceptions.repeatedly")
def _repeatedly(place: Place) -> Iterable[Case]:
    """Several exceptions in a row, in forward and backward, leave nothing behind."""
    raised = (_raised(9, 1), _raised(8, 1, backward=True), _raised(7, 0))
    yield place.case("mlp", *iteration(0), *raised, *iteration(1), _raised(6, 2, backward=True), *iteration(2))
