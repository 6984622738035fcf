"""One judgement, in one order, three-valued: each fact refutes by itself, and what weighs more is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import (
    OUTLIVES,
    Batch,
    Case,
    CaseRecord,
    FailureKind,
    ForwardBackward,
    Judgement,
    MixedPrecisionSpec,
    ModelSpec,
    OperationAccount,
    RaisedError,
    RankObservation,
    Verdict,
    WorldSpec,
)
from fsdp_testing.judging import batch_judge
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.divergence import Compared, Divergence
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.judging.judge import judge
from fsdp_testing.judging.numbers import Numbers, compare_numbers
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.quantities import Expectation, ExpectedPoint, Quantity
from fsdp_testing.ranks.ledger.reading import CollectiveRecord
from fsdp_testing.ranks.pool import Fate, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.cause import Stuck

TREE = {"width": 2, "nodes": [{"kind": "linear", "name": "a", "out": 2}]}
CASE = Case(ModelSpec("tree", tree=TREE), WorldSpec(2), (ForwardBackward(Batch(0)),))
WHOLE = Expectation((ExpectedPoint(1, {}),), {})
OFF = Divergence(FailureKind.DIVERGED, Quantity("gradient", "w"), 0, (0,), "is off by 3", max_error=3.0)
RIGHT, WRONG = Compared(comparisons=3), Compared(comparisons=3, divergences=[OFF])
KEPT = (OperationAccount(0, backward=True, held=(("", 64),)),)
REVIEWED = finding(CASE, FailureKind.DIVERGED, "the rule", 0, "is broken", ranks=(0,))


def records(one: CaseRecord | None = None, **facts: object) -> list[CaseRecord]:
    """Of two ranks; `facts` are those of the second."""
    other = CaseRecord(0, RankObservation(1))
    return [one or CaseRecord(0, RankObservation(0)), replace(other, **facts)]  # type: ignore[arg-type]  # as given


def raising(rank: int = 1, **facts: bool) -> RankObservation:
    return RankObservation(rank, error=RaisedError(0, "ValueError", "no", "", **facts))


def judged(
    message: Sequence[CaseRecord],
    tally: Compared = RIGHT,
    problem: str = "",
    outcome: WorldOutcome | None = None,
    **rest: object,
) -> Judgement:
    return judge(CASE, message, lambda _: Numbers(tally, WHOLE, problem), outcome=outcome, **rest)  # type: ignore[arg-type]


def world(*fates: Fate, cause: str = "") -> WorldOutcome:
    ranks = tuple(RankOutcome(rank, fate, exit_code=7) for rank, fate in enumerate(fates))
    said: Any = SimpleNamespace(sentence=lambda: cause) if cause else None
    return WorldOutcome("test", len(fates), "gloo", ranks, said)


LADDER = [
    (records(observation=raising(not_implementation_fault=True)), WRONG, None),
    (records(observation=raising(), leaks=("grad mode: a",)), WRONG, "diverged"),
    (records(observation=raising(), leaks=("grad mode: a",)), RIGHT, "one_raised"),
    (records(collectives={1: (3, 4)}, leaks=("grad mode: a",)), RIGHT, "leaked"),
    # Rank 1 is a member of a group that only rank 0 used.
    (
        records(CaseRecord(0, RankObservation(0), {1: (2, 5)}, groups={1: (0, 1)}), collectives={}),
        RIGHT,
        "uncoordinated",
    ),
    ([replace(r, collectives={1: (r.observation.rank, 4)}, accounts=KEPT) for r in records()], RIGHT, "uncoordinated"),
    ([replace(r, accounts=KEPT) for r in records(leaks=("grad mode: a",))], RIGHT, "kept"),
    (records(accounts=KEPT), RIGHT, ""),
    (records(leaks=("grad mode: a before", OUTLIVES)), Compared(), "leaked"),
    (records(), RIGHT, ""),
]


@pytest.mark.parametrize(("message", "tally", "kind"), LADDER)
def test_the_weightiest_fact_is_the_judgement(message, tally, kind):
    found = judged(message, tally)
    assert found.verdict is {None: Verdict.UNKNOWN, "": Verdict.PASS}.get(kind, Verdict.FAIL)
    assert (found.finding.kind if found.finding else "") == (kind or "")


@pytest.mark.parametrize(
    ("tally", "problem", "reason"),
    [
        (Compared(), "", "nothing was compared"),
        (
            Compared(comparisons=3, undecided=[OFF]),
            "",
            "after operation 0 forward_backward(batch 0): gradient of w is off by 3",
        ),
        (WRONG, "the oracle's own numbers overflow", "the oracle's own numbers overflow"),
        (RIGHT, "the oracle did not finish this case", "the oracle did not finish this case"),
    ],
)
def test_what_decides_nothing_is_unknown_but_does_not_hide_what_refutes(tally, problem, reason):
    found = judged(records(leaks=(OUTLIVES,)), tally, problem)
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason.startswith(reason)
    assert judged(records(leaks=("grad mode: a",)), tally, problem).verdict is Verdict.FAIL


def test_groups_of_other_ranks_and_ranks_that_count_nothing_say_nothing():
    alone = CaseRecord(0, RankObservation(0), {1: (2, 5)}, groups={1: (0,)})
    assert judged(records(alone, collectives={})).verdict is Verdict.PASS
    assert judged(records(replace(alone, groups={1: (0, 1)}))).verdict is Verdict.PASS


def test_ranks_that_parted_are_told_beside_whatever_weighs_more():
    assert not judged(records(collectives={1: (3, 4)}), WRONG).parted
    counted = [replace(record, collectives={1: (record.observation.rank, 4)}) for record in records()]
    verdict = judged(counted, WRONG)
    assert verdict.finding is not None
    assert (verdict.finding.kind, verdict.parted) == ("diverged", True)


def test_a_model_that_stays_is_asked_last():
    found = judged(records(leaks=(OUTLIVES,)))
    assert found.finding is not None
    assert (found.finding.kind, found.only_model_stays) == ("leaked", True)
    assert str(signature_of(found.finding)) == "leaked model"


def test_a_rule_of_the_check_is_asked_where_the_oracle_came_to_the_end():
    assert judged(records(), review=lambda *_: REVIEWED).finding is REVIEWED
    assert judged(records(), problem="no end", review=lambda *_: REVIEWED).verdict is Verdict.UNKNOWN
    assert judged(records(leaks=("grad mode: a",)), review=lambda *_: REVIEWED).finding is REVIEWED


@pytest.mark.parametrize(
    ("message", "outcome", "expected"),
    [
        ([], None, "unfinished"),
        ([CaseRecord(0, raising())], None, "one_raised"),
        ([CaseRecord(0, raising())], world(Fate.HUNG, Fate.RETURNED), "one_raised"),
        ([CaseRecord(0, raising())], world(Fate.DIED, Fate.RETURNED, cause="rank 0 died"), "died"),
        ([], world(Fate.DIED, Fate.RAISED, cause="rank 0 died"), "died"),
        ([], world(Fate.HUNG, Fate.STOPPED, cause="rank 0 hung"), "hung"),
        ([], world(Fate.RAISED, Fate.HUNG, cause="rank 0 raised"), "unknown"),
        ([], world(Fate.RETURNED, Fate.RETURNED), "unknown"),
        ([CaseRecord(0, raising(not_supported=True))], None, "one_raised"),
    ],
)
def test_ranks_that_did_not_report(message, outcome, expected):
    found = judged(message, outcome=outcome)
    unreported = "unfinished" if found.incomplete else found.verdict.value
    assert (found.finding.kind if found.finding else unreported) == expected
    assert found.verdict is (Verdict.FAIL if found.finding else Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("fates", "verdict"),
    [
        ((Fate.STOPPED, Fate.RETURNED), Verdict.FAIL),
        ((Fate.STOPPED, Fate.RAISED), Verdict.UNKNOWN),  # by nobody's program: the harness failed there
    ],
)
def test_a_rank_that_would_wait_for_ever_refutes(fates, verdict):
    record = CollectiveRecord(2, "default group", 7, "all_reduce(sum) float64[3]", "train.py:3 in step")
    outcome = replace(world(*fates), diagnosis=Stuck(0, 1, record, None, failed=False))
    found = judged([CaseRecord(0, RankObservation(1))], outcome=outcome)
    assert found.verdict is verdict
    if found.finding is not None:
        assert (found.finding.kind, found.finding.statement) == ("uncoordinated", outcome.cause)
        assert found.finding.statement.startswith("rank 0 waits in all_reduce(sum) #2 float64[3]")


def test_the_ledger_says_that_ranks_did_not_communicate_alike():
    found = judged(records(), outcome=world(Fate.RETURNED, Fate.RETURNED, cause="rank 0 gathers once more"))
    assert found.finding is not None
    assert (found.finding.kind, found.finding.statement) == ("uncoordinated", "rank 0 gathers once more")


def test_refusing_what_is_claimed_is_a_failure_as_any_other():
    found = judged([CaseRecord(0, raising(rank, not_supported=True)) for rank in range(2)])
    assert found.verdict is Verdict.FAIL
    assert found.finding is not None
    signature = signature_of(found.finding)
    assert (signature.kind, signature.quantity, found.why) == ("raised", "ValueError: no", "ValueError: no")


def test_an_oracle_that_ends_early_decides_nothing(monkeypatch):
    monkeypatch.setattr(agreement, "compare", lambda *_: RIGHT)
    ranks = [RankObservation(0), RankObservation(1)]
    short = Expectation((ExpectedPoint(0, {}),), {})
    assert "did not finish" in compare_numbers(CASE, short, ranks, batch_judge.Comparison()).problem
    assert not compare_numbers(CASE, WHOLE, ranks, batch_judge.Comparison()).problem


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [
        (Compared(comparisons=3), Compared(), [False]),
        (WRONG, RIGHT, [False, True]),
        (WRONG, WRONG, [False, True]),
        (Compared(comparisons=3, undecided=[OFF]), RIGHT, [False, True]),
    ],
)
def test_a_case_in_lockstep_is_replayed_again_where_one_replay_does_not_decide_it(monkeypatch, first, second, asked):
    replays: list[bool] = []
    tallies = iter((first, second))

    def expect(_case, _division, _states, *, displaced=True):
        replays.append(displaced)
        return WHOLE

    monkeypatch.setattr(oracle, "expect_lockstep", expect)
    monkeypatch.setattr(batch_judge, "_FOLLOWED", [])  # replays are shared by cases that are alike
    monkeypatch.setattr(agreement, "compare", lambda expectation, ranks, comparison: next(tallies))
    case = replace(CASE, mixed_precision=MixedPrecisionSpec("bfloat16"))
    numbers = batch_judge.ask_here(registry.load("torch-ddp"), case, [], observe_all=False)
    assert replays == asked
    assert numbers.tally is (second if len(asked) > 1 else first)
