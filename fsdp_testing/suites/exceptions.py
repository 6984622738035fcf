"""Exceptions: after the user's own code raised, one ordinary iteration is an ordinary iteration."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Batch, Case, Interrupt, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Builder, Check, Place, Suite
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch

_NEEDS = frozenset({"exception_recovery"})
_SOURCE = "what a pass changed is put back on every way out of it"


def _raised(seed: int, place: int, *, backward: bool = False, where: str = "step") -> Interrupt:
    return Interrupt(Batch(seed), place, backward, where)


def _in_a_pass(*, backward: bool) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        # Before the first pass has ever ended, and in the middle of training; at the first module and at the last.
        yield place.case("mlp", _raised(9, 0, backward=backward), *iterations(2), optimizer=ADAMW)
        for at in (0, 2):
            program = (*iterations(1), _raised(9, at, backward=backward), *iterations(2, first=1))
            yield place.case("deep_nest", *program, optimizer=ADAMW)

    return build


SUITE = Suite()


SUITE.add(
    Check(
        "exceptions.in_forward",
        "After an exception in a forward, training goes on as if it had not begun.",
        _SOURCE,
        _in_a_pass(backward=False),
        _NEEDS,
    )
)


SUITE.add(
    Check(
        "exceptions.in_backward",
        "After an exception in a backward and zero_grad, training goes on as if neither had been.",
        _SOURCE,
        _in_a_pass(backward=True),
        _NEEDS,
    )
)


@SUITE.check("exceptions.in_no_sync", source="contextlib: the exit runs on every way out", needs=_NEEDS | {"no_sync"})
def _in_no_sync(place: Place) -> Iterable[Case]:
    """An exception inside no_sync ends it: the next iteration reduces."""
    for backward in (False, True):
        program = (
            *iterations(1),
            _raised(9, 1, backward=backward, where="no_sync"),
            micro_batch(1),
            Observe(),
            Step(),
            ZeroGrad(),
            *accumulated(2, 3),
            Step(),
        )
        yield place.case("mlp", *program)


@SUITE.check(
    "exceptions.in_summon",
    source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params",
    needs=_NEEDS | {"summon_writeback"},
)
def _in_summon(place: Place) -> Iterable[Case]:
    """An exception while full parameters are gathered releases them."""
    yield place.case(
        "mlp", _raised(9, 0, where="summon"), *iterations(1), _raised(8, 0, where="summon"), micro_batch(1), Step()
    )


@SUITE.check("exceptions.repeatedly", source=_SOURCE, needs=_NEEDS)
def _repeatedly(place: Place) -> Iterable[Case]:
    """Several exceptions in a row, in forward and backward, leave nothing behind."""
    program = (
        *iterations(1),
        _raised(9, 1),
        _raised(8, 1, backward=True),
        _raised(7, 0),
        *iterations(1, first=1),
        _raised(6, 2, backward=True),
        *iterations(1, first=2),
    )
    yield place.case("mlp", *program)
