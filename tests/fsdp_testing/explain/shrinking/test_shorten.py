"""Operations are left out while the failure looks the same, and no longer; a budget ends the search early."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_testing.cases.records import (
    Batch,
    Case,
    Finding,
    Forward,
    ForwardBackward,
    ModelSpec,
    Operation,
    Step,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.explain.shrinking.shrink import Budget, shorten, with_schedule

LONG = (
    ForwardBackward(Batch(0)),
    ZeroGrad(),
    ForwardBackward(Batch(1)),
    Forward(Batch(2), "eval"),
    Step(),
    ZeroGrad(),
    Forward(Batch(3), "eval"),
    ForwardBackward(Batch(4)),
    Step(),
)
CASE = Case(ModelSpec("mlp"), WorldSpec(2), LONG)


def stale(case: Case, quantity: str = "loss on rank 0") -> Finding | None:
    """Fails like an implementation that uses weights of before the step after forward, step, forward."""
    kinds = [type(operation) for operation in case.program]
    looked = stepped = False
    for index, kind in enumerate(kinds):
        if kind is Forward and looked and stepped:
            text = f"after operation {index}: {quantity} is off by 1"
            return Finding("diverged", quantity, index, "", (0,), text, case, 1.0, 1e-12)
        looked, stepped = looked or kind is Forward, stepped or (looked and kind is Step)
    return None


def kinds(case: Case) -> list[type[Operation]]:
    return [type(operation) for operation in case.program]


def found(judge: Callable[[Case], Finding | None] = stale) -> Finding:
    finding = judge(CASE)
    assert finding is not None
    return finding


def test_only_what_is_needed_remains() -> None:
    short, complete = shorten(found(), stale, Budget(1000))
    assert kinds(short.case) == [Forward, Step, Forward]
    assert complete
    assert short.case.program[0] == Forward(Batch(2), "eval")


def test_another_failure_is_not_taken_for_the_same() -> None:
    def other_when_short(case: Case) -> Finding | None:
        return stale(case, "loss on rank 0" if len(case.program) > 4 else "parameter layers.0.weight")

    short, _ = shorten(found(other_when_short), other_when_short, Budget(1000))
    assert len(short.case.program) == 5


def test_a_budget_ends_the_search_and_says_so() -> None:
    runs: list[Case] = []

    def counted(case: Case) -> Finding | None:
        runs.append(case)
        return stale(case)

    short, complete = shorten(found(), counted, Budget(2))
    assert len(runs) == 2
    assert not complete
    assert len(short.case.program) < len(LONG)
    assert shorten(found(), counted, Budget(0))[0].case == CASE


def test_a_failure_that_never_repeats_stays_as_it_was() -> None:
    short, complete = shorten(found(), lambda case: None, Budget(1000))
    assert short.case == CASE
    assert complete


def test_a_known_schedule_is_found_in_another_program() -> None:
    known = (Forward(Batch(9), "no_grad"), Step(), Forward(Batch(3), "eval"))
    (alike,) = with_schedule(CASE, known)
    assert alike.program == (LONG[3], LONG[4], LONG[6])
    same, by_kind = with_schedule(CASE, (LONG[0], LONG[8]))
    assert same.program == (LONG[0], LONG[8])
    assert by_kind.program == (LONG[7], LONG[8])
    assert list(with_schedule(CASE, (Step(), Step(), Step()))) == []
