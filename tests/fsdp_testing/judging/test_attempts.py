"""What is said of cases whose ranks were lost: a death or a hang has to show twice, and a bad case costs itself only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    ForwardBackward,
    Judgement,
    ModelSpec,
    Verdict,
    WorldSpec,
)
from fsdp_testing.judging.attempts import Attempt, confirmed, settle
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.ranks.pool import Fate, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.cause import Diverged, Refused
from fsdp_testing.ranks.pool.outcome import ErrorRecord

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)),))
RIGHT = Judgement(Verdict.PASS)
UNREPORTED = Judgement(Verdict.UNKNOWN, reason="not every rank reported", incomplete=True)
WRONG = Judgement(Verdict.FAIL, finding(CASE, FailureKind.DIVERGED, "output", 0, "is off", ranks=(0,)))
ONE_RAISED = Judgement(
    Verdict.FAIL, finding(CASE, FailureKind.ONE_RAISED, "ValueError", 0, "rank 0 raised", ranks=(0,))
)


def world(fate: Fate = Fate.RETURNED, cause: str = "") -> WorldOutcome:
    ranks = RankOutcome(0, Fate.RETURNED if fate is Fate.RETURNED else Fate.STOPPED), RankOutcome(1, fate, exit_code=7)
    said: Any = SimpleNamespace(sentence=lambda: cause) if cause else None
    return WorldOutcome("batch", 2, "gloo", ranks, said)


WELL, DEAD, STUCK = world(), world(Fate.DIED, "rank 1 died"), world(Fate.HUNG, "rank 1 hung")
UNEVEN = world(cause="ranks disagree")
DIVERGED = replace(UNEVEN, diagnosis=Diverged("group 1"))
REFUSED = replace(UNEVEN, diagnosis=Refused(0, ErrorRecord("CollectiveMismatch", "collective #3 differs", "")))


def settled(count: int, *attempts: tuple[WorldOutcome, Sequence[Judgement]], **how: Any) -> tuple[list[str], list[Any]]:
    """What is said of `count` cases, whose attempts on ranks give this one after the other; and which were attempted."""
    left, ran = list(attempts), []

    def run(start: int, stop: int) -> Attempt:
        outcome, judgements = left.pop(0)
        ran.append((start, stop))
        return Attempt(judgements, outcome)

    said = settle([CASE] * count, run, **how)
    assert not left, "an attempt was not made"
    return [one.finding.kind.value if one.finding else one.verdict.value for one in said], ran


def test_a_batch_that_ends_well_is_taken_as_it_was_judged():
    assert settled(3, (WELL, [RIGHT, WRONG, RIGHT])) == (["pass", "diverged", "pass"], [(0, 3)])


@pytest.mark.parametrize(("lost", "kind"), [(DEAD, "died"), (STUCK, "hung")])
def test_a_loss_is_a_failure_once_it_has_shown_twice(lost: WorldOutcome, kind: str):
    assert settled(1, (lost, [UNREPORTED]), (lost, [UNREPORTED])) == ([kind], [(0, 1), (0, 1)])
    # Among others it is first on other ranks the second time.
    said = settled(3, (lost, [RIGHT, UNREPORTED, UNREPORTED]), (lost, [UNREPORTED, UNREPORTED]), (WELL, [RIGHT]))
    assert said == (["pass", kind, "pass"], [(0, 3), (1, 3), (2, 3)])


@pytest.mark.parametrize("second", [(WELL, [RIGHT]), (WELL, [WRONG]), (DEAD, [UNREPORTED])])
def test_a_hang_that_does_not_show_again_is_unknown(second: tuple[WorldOutcome, list[Judgement]]):
    assert settled(1, (STUCK, [UNREPORTED]), second) == (["unknown"], [(0, 1), (0, 1)])


def test_a_loss_in_the_middle_that_does_not_show_again_leaves_that_case_unknown_and_keeps_what_it_does_instead():
    middle = (DEAD, [RIGHT, UNREPORTED, UNREPORTED])
    assert settled(3, middle, (WELL, [RIGHT, RIGHT]))[0] == ["pass", "unknown", "pass"]
    assert settled(3, middle, (WELL, [WRONG, RIGHT]))[0] == ["pass", "diverged", "pass"]


def test_nothing_is_asked_twice_of_runs_that_decide_no_verdict():
    assert settled(1, (STUCK, [UNREPORTED]), repeats=False) == (["hung"], [(0, 1)])


@pytest.mark.parametrize(("outcome", "kind"), [(DEAD, "died"), (STUCK, "hung"), (UNEVEN, "")])
def test_ranks_that_are_lost_after_the_last_report_make_each_case_run_alone(outcome: WorldOutcome, kind: str):
    lost = (outcome, [RIGHT])
    found, ran = settled(2, (outcome, [RIGHT, RIGHT]), (DEAD, [RIGHT]), (WELL, [RIGHT]))
    assert (found, ran) == (["died", "pass"], [(0, 2), (0, 1), (1, 2)])
    assert settled(2, (outcome, [RIGHT, RIGHT]), (WELL, [RIGHT]), (WELL, [RIGHT]))[0] == ["pass", "unknown"]
    assert settled(1, lost, *[lost] * bool(kind))[0] == [kind or "unknown"]


def test_an_earlier_failure_does_not_explain_ranks_that_parted_in_a_later_case():
    """A case that fails on all ranks lets its batch go on: what became of the ranks then is said by the last one."""
    found = settled(2, (UNEVEN, [WRONG, RIGHT]), (WELL, [WRONG]), (UNEVEN, [RIGHT]))[0]
    assert found == ["diverged", "unknown"]
    # If its own ranks part, the later one is cleared.
    assert settled(2, (UNEVEN, [WRONG, RIGHT]), (UNEVEN, [WRONG]), (WELL, [RIGHT]))[0] == ["diverged", "pass"]
    unfinished = settled(3, (UNEVEN, [WRONG, RIGHT, UNREPORTED]), (WELL, [RIGHT]))
    assert unfinished == (["diverged", "pass", "unknown"], [(0, 3), (2, 3)])


def test_ranks_that_part_in_a_case_that_runs_alone_leave_that_case_unknown():
    found = settled(2, (UNEVEN, [RIGHT, RIGHT]), (UNEVEN, [RIGHT]), (WELL, [RIGHT]))[0]
    assert found == ["unknown", "pass"]


def test_cases_behind_one_whose_ranks_issued_different_collectives_run_on_new_ranks():
    """A rank that waits in one case more meets the collectives of the next, which then looks wrong."""
    parted = replace(WRONG, parted=True)
    verdicts = settled(4, (UNEVEN, [RIGHT, parted, ONE_RAISED, UNREPORTED]), (WELL, [RIGHT, RIGHT]))
    assert verdicts == (["pass", "diverged", "pass", "pass"], [(0, 4), (2, 4)])


@pytest.mark.parametrize("disagreeing", [DIVERGED, REFUSED])
def test_a_case_that_some_ranks_began_before_others_ended_the_one_before_runs_on_new_ranks(disagreeing: WorldOutcome):
    """It raises where it meets the collective in which they still wait."""
    reported = [RIGHT, UNREPORTED, ONE_RAISED, UNREPORTED]
    verdicts = settled(4, (disagreeing, reported), (disagreeing, reported[1:]), (WELL, [RIGHT, RIGHT]))
    assert verdicts == (["pass", "uncoordinated", "pass", "pass"], [(0, 4), (1, 4), (2, 4)])


def test_what_survivors_of_a_death_raise_is_its_echo():
    assert settled(1, (DEAD, [ONE_RAISED]), (DEAD, [ONE_RAISED]))[0] == ["died"]
    assert settled(1, (world(Fate.RAISED, "rank 1 raised"), [ONE_RAISED]))[0] == ["one_raised"]


def test_what_a_stopped_rank_raises_is_an_echo_unless_a_rank_had_raised_before():
    """Its peers may be gone before it is stopped: gloo says that the connection was closed."""
    waiting, returned = RankOutcome(0, Fate.STOPPED), RankOutcome(1, Fate.RETURNED)
    apart = replace(DIVERGED, ranks=(waiting, returned))
    assert settled(1, (apart, [ONE_RAISED]))[0] == ["uncoordinated"]
    # A rank that raised by itself returned, and what it says counts.
    assert settled(1, (replace(apart, ranks=(RankOutcome(0, Fate.RETURNED, failed=True), waiting)), [ONE_RAISED]))[
        0
    ] == ["one_raised"]
    assert settled(1, (replace(apart, ranks=(waiting, RankOutcome(1, Fate.RAISED))), [ONE_RAISED]))[0] == ["one_raised"]


def test_nothing_runs_on_new_ranks_once_a_case_has_failed_as_wanted():
    assert WRONG.finding is not None
    until = signature_of(WRONG.finding)
    assert settled(4, (DEAD, [RIGHT, WRONG, UNREPORTED, UNREPORTED]), until=until) == (["pass", "diverged"], [(0, 4)])


def failing(kind: FailureKind, type_name: str = "ValueError", at: int = 0, message: str = "odd") -> Judgement:
    return Judgement(Verdict.FAIL, finding(CASE, kind, type_name, at, "why", ranks=(0,), message=message))


@pytest.mark.parametrize(
    ("alone", "verdict"),
    [
        (failing(FailureKind.RAISED, message="of another rank"), Verdict.FAIL),
        (failing(FailureKind.RAISED, "TypeError"), Verdict.UNKNOWN),
        (failing(FailureKind.RAISED, at=1), Verdict.UNKNOWN),
        (failing(FailureKind.DIVERGED), Verdict.UNKNOWN),
        (RIGHT, Verdict.UNKNOWN),
    ],
)
def test_what_one_rank_raised_among_others_and_every_rank_alone_is_a_failure(alone: Judgement, verdict: Verdict):
    """Among others the other ranks had been stopped before they came to it."""
    said = confirmed(failing(FailureKind.ONE_RAISED), alone)
    assert said.verdict is verdict
    assert said.finding is (alone.finding if verdict is Verdict.FAIL else None)


def test_what_fails_among_others_and_holds_alone_is_unknown():
    assert confirmed(WRONG, WRONG) is WRONG
    assert confirmed(WRONG, RIGHT).reason.startswith(
        "this case gives different results: first diverged output in forward; then, on other ranks, it held."
    )
