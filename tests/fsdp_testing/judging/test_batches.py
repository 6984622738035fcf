"""A bad case costs itself only: those before it and after it in its batch are judged all the same."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import pytest
import torch
from fuzz_cases import case, micro
from torch import nn

from fsdp_testing import run_ranks
from fsdp_testing.cases.records import Case, Clip, Observe, Step
from fsdp_testing.judging.batch import Watch, _Issued
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.signature import Signature
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.rank_jobs import survivors
from fsdp_testing.ranks.ledger.calls import call_for
from fsdp_testing.ranks.ledger.records import GroupIdentity
from fsdp_testing.ranks.pool import default_pool

GOOD = case(micro(1), Step(), strategy="full_shard")
BAD = case(micro(1), Clip(0.5), Step(), strategy="full_shard")


def statuses(name: str, *cases: Case, **watch: bool) -> list[tuple[str, str]]:
    # Nobody but the deadline ends a rank that sleeps; everything else is noticed as it happens.
    deadline = 5.0 if "HANGS" in name else 60.0
    results = CaseRunner(default_pool(), timeout=deadline).judge_batch(name, cases, Watch(**watch))
    return [(r.verdict.value, r.signature.kind if r.signature else "") for r in results]


def test_a_healthy_batch_passes_and_compares_something():
    results = CaseRunner(default_pool()).judge_batch("toy:UNBROKEN", [GOOD] * 5)
    assert [result.verdict.value for result in results] == ["pass"] * 5
    assert all(result.judgement.tally.comparisons > 5 for result in results)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fuzz_faults:RAISES_IN_CLIP", "raised"),
        ("fuzz_faults:ONE_RAISES_IN_CLIP", "one_raised"),
        ("fuzz_faults:DIES_IN_CLIP", "died"),
        ("fuzz_faults:HANGS_IN_CLIP", "hung"),
        ("fuzz_faults:LEAKS_IN_CLIP", "leaked"),
        ("fuzz_faults:WRONG_IN_CLIP", "diverged"),
    ],
)
def test_a_bad_case_is_told_and_costs_itself_only(name: str, kind: str):
    assert statuses(name, GOOD, GOOD, BAD, GOOD, GOOD) == [
        ("pass", ""),
        ("pass", ""),
        ("fail", kind),
        ("pass", ""),
        ("pass", ""),
    ]


def test_ranks_that_part_silently_are_told():
    # Whole copies are clipped without a collective, so that nothing meets the one that nobody joins.
    good, bad = (case(*one.program, strategy="no_shard") for one in (GOOD, BAD))
    found = statuses("fuzz_faults:GATHERS_MORE_IN_CLIP", good, bad, good)
    # The ledger refuses it on one rank if the other one has gone on by then; else the digests of the case differ.
    assert found[0] == ("pass", "")
    assert found[1] in {("fail", "uncoordinated"), ("fail", "one_raised")}


@pytest.mark.parametrize(
    ("name", "kind"),
    # A hang goes the way of a death (test_attempts.py asks both of `settle`), and waits for two deadlines.
    [("DIES_LATE", "died"), pytest.param("HANGS_LATE", "hung", marks=pytest.mark.slow)],
)
def test_a_rank_that_is_lost_after_its_last_report_is_told_of_the_case_that_loses_it(name: str, kind: str):
    bad = ("fail", kind)
    if name == "DIES_LATE":
        assert statuses(f"fuzz_faults:{name}", GOOD, BAD, GOOD) == [("pass", ""), bad, ("pass", "")]
    # Alone a hang goes the same way, and takes a third of the deadlines.
    assert statuses(f"fuzz_faults:{name}", BAD) == [bad]


def test_a_rank_that_is_lost_once_and_not_again_leaves_one_case_unjudged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv("FUZZ_DIES_ONCE", str(once))
    results = CaseRunner(default_pool()).judge_batch("fuzz_faults:DIES_ONCE", [GOOD, BAD, GOOD])
    assert not once.exists(), "nothing died"
    assert [result.verdict.value for result in results] == ["pass", "pass", "unknown"]
    assert "different results" in results[-1].judgement.why
    assert "SIGKILL" in results[-1].judgement.why


def test_a_case_that_loses_a_rank_after_another_one_only_is_unjudged():
    """It is the first of the next batch, on other ranks, and nothing happens to it there."""
    results = CaseRunner(default_pool()).judge_batch("fuzz_faults:DIES_AT_NEXT", [BAD, GOOD])
    assert [result.verdict.value for result in results] == ["pass", "unknown"]
    assert "different results: first ranks 0, 1 died by SIGKILL" in results[1].judgement.why


def test_two_bad_cases_in_a_row():
    found = statuses("fuzz_faults:DIES_IN_CLIP", BAD, BAD, GOOD)
    assert found == [("fail", "died"), ("fail", "died"), ("pass", "")]


def test_nothing_is_run_on_new_ranks_once_a_case_has_failed_as_asked():
    runner, name = CaseRunner(default_pool()), "fuzz_faults:ONE_RAISES_IN_CLIP"
    (alone,) = runner.judge_batch(name, [BAD])
    results = runner.judge_batch(name, [GOOD, BAD, GOOD, BAD], until=alone.signature)
    assert [result.verdict.value for result in results] == ["pass", "fail"]
    assert runner.worlds.lost == 2
    assert len(runner.judge_batch(name, [GOOD, BAD, GOOD], until=Signature("died"))) == 3


def test_a_case_may_be_given_less_time_than_the_runner_gives():
    impatient = CaseRunner(default_pool(), timeout=3600.0).impatient(3.0)
    results = impatient.judge_batch("fuzz_faults:HANGS_IN_CLIP", [BAD])
    assert [(one.signature or Signature("")).kind for one in results] == ["hung"]
    assert impatient.worlds.lost == 1, "one hang is taken for one"


def test_what_the_implementation_refuses_although_it_claims_it_is_a_failure():
    assert statuses("fuzz_faults:REFUSES_CLIP", GOOD, BAD, GOOD) == [
        ("pass", ""),
        ("fail", "raised"),
        ("pass", ""),
    ]


def test_the_first_operation_that_diverges_is_known_when_asked():
    (result,) = CaseRunner(default_pool()).judge_batch("fuzz_faults:WRONG_IN_CLIP", [BAD], Watch(operations=True))
    assert result.signature is not None
    assert result.signature.operation == "clip"


def test_a_model_that_outlives_its_case_is_told():
    assert statuses("fuzz_faults:KEEPS_MODELS", GOOD, models=True) == [("fail", "leaked")]
    assert statuses("toy:UNBROKEN", GOOD, models=True) == [("pass", "")]


def test_what_a_finalizer_lets_go_of_is_no_model_that_stays():
    class Keeper:
        def __init__(self, kept):
            self.kept, self.me = kept, self

        def __del__(self):
            self.kept.clear()

    model = nn.Linear(1, 1)
    model.itself = [model]  # only a collection frees it
    kept, seen = [model], weakref.ref(model)
    Keeper(kept)
    del model
    assert survivors([(0, seen)]) == []


def test_an_engine_is_asked_in_its_own_terms():
    """Its step clears gradients and it trains in float32: as the case stands, both would be reported as failures."""
    program = (micro(1), Step(), micro(2), Observe(), Step())
    assert statuses("toy_engine:UNBROKEN", case(*program, strategy="full_shard")) == [("pass", "")]


def test_what_an_implementation_warns_of_decides_nothing():
    assert statuses("fuzz_strict:WARNS", GOOD) == [("pass", "")]


def filters() -> list[str]:
    return [str(entry[0]) for entry in warnings.filters]


def test_what_a_batch_changes_in_its_ranks_does_not_outlive_it():
    """The module of this implementation makes warnings errors for the whole process when it is imported."""
    before = run_ranks(filters)
    assert "error" not in before[0]
    assert statuses("fuzz_strict:WARNS", GOOD) == [("pass", "")]
    assert run_ranks(filters) == before


def test_a_thread_of_torch_lets_go_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [nn.Linear(1, 1)]
    monkeypatch.setattr(rank_jobs.time, "sleep", lambda seconds: kept.clear())
    assert survivors([(0, weakref.ref(kept[0]))]) == []


def test_ranks_that_send_uneven_parts_issue_the_same_collectives():
    group = GroupIdentity(1, "group", (0, 1), blocking_host=True)
    summaries = []
    for sizes, operation in ((3, "sum"), (7, "sum"), (7, "max")):
        issued = _Issued()
        issued(group, call_for(("all_to_all_single", (), torch.uint8, torch.Size([sizes]))), "")
        issued(group, call_for(("all_reduce", (operation,), torch.float64, torch.Size([2]))), "")
        summaries.append(issued.summary())
    assert summaries[0] == summaries[1] != summaries[2]
