"""A bad case costs itself only: those before it and after it in its batch are judged all the same."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import pytest
from fuzz_cases import case, micro
from torch import nn

from fsdp_testing import run_ranks
from fsdp_testing.cases.records import Case, Clip, Observe, Step
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.campaign import batch
from fsdp_testing.search.campaign.batch import Watch
from fsdp_testing.search.campaign.lane import Lane

GOOD = case(micro(1), Step(), strategy="full_shard")
BAD = case(micro(1), Clip(0.5), Step(), strategy="full_shard")


def statuses(name: str, *cases: Case, **watch: bool) -> list[tuple[str, str]]:
    # Nobody but the deadline ends a rank that sleeps; everything else is noticed as it happens.
    deadline = 10.0 if "HANGS" in name else 60.0
    results = Lane(default_pool(), name, deadline).run(cases, Watch(**watch))
    return [(r.note.status, r.note.signature.kind if r.note.signature else "") for r in results]


def test_a_healthy_batch_passes_and_compares_something():
    results = Lane(default_pool(), "toy:UNBROKEN").run([GOOD] * 5)
    assert [result.note.status for result in results] == ["passed"] * 5
    assert all(result.note.comparisons > 5 for result in results)


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
        ("passed", ""),
        ("passed", ""),
        ("suspect", kind),
        ("passed", ""),
        ("passed", ""),
    ]


def test_ranks_that_part_silently_are_told():
    # Whole copies are clipped without a collective, so that nothing meets the one that nobody joins.
    good, bad = (case(*one.program, strategy="no_shard") for one in (GOOD, BAD))
    found = statuses("fuzz_faults:GATHERS_MORE_IN_CLIP", good, bad, good)
    # The ledger refuses it on one rank if the other one has gone on by then; else the digests of the case differ.
    assert found[0] == ("passed", "")
    assert found[1] in {("suspect", "uncoordinated"), ("suspect", "one_raised")}


@pytest.mark.parametrize(("name", "kind"), [("DIES_LATE", "died"), ("HANGS_LATE", "hung")])
def test_a_rank_that_is_lost_after_its_last_report_is_told_of_the_case_that_loses_it(name: str, kind: str):
    bad = ("suspect", kind)
    expected = [("passed", ""), bad, ("passed", "")]
    assert statuses(f"fuzz_faults:{name}", GOOD, BAD, GOOD) == expected
    assert statuses(f"fuzz_faults:{name}", BAD) == [bad]


def test_a_rank_that_is_lost_once_and_not_again_leaves_one_case_unjudged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv("FUZZ_DIES_ONCE", str(once))
    results = Lane(default_pool(), "fuzz_faults:DIES_ONCE").run([GOOD, BAD, GOOD])
    assert not once.exists(), "nothing died"
    assert [result.note.status for result in results] == ["passed", "passed", "unjudged"]
    assert "different results" in results[-1].note.reason
    assert "SIGKILL" in results[-1].note.reason


def test_a_case_that_loses_a_rank_after_another_one_only_is_unjudged():
    """It is the first of the next batch, on other ranks, and nothing happens to it there."""
    results = Lane(default_pool(), "fuzz_faults:DIES_AT_NEXT").run([BAD, GOOD])
    assert [result.note.status for result in results] == ["passed", "unjudged"]
    assert "different results: first ranks 0, 1 died by SIGKILL" in results[1].note.reason


def test_two_bad_cases_in_a_row():
    found = statuses("fuzz_faults:DIES_IN_CLIP", BAD, BAD, GOOD)
    assert found == [("suspect", "died"), ("suspect", "died"), ("passed", "")]


def test_nothing_is_run_on_new_ranks_once_a_case_has_failed_as_asked():
    lane = Lane(default_pool(), "fuzz_faults:ONE_RAISES_IN_CLIP")
    (alone,) = lane.run([BAD])
    results = lane.run([GOOD, BAD, GOOD, BAD], until=alone.note.signature)
    assert [result.note.status for result in results] == ["passed", "suspect"]
    assert lane.worlds_lost == 2
    assert len(lane.run([GOOD, BAD, GOOD], until=Signature("died"))) == 3


def test_a_case_may_be_given_less_time_than_the_lane_gives():
    results = Lane(default_pool(), "fuzz_faults:HANGS_IN_CLIP", 3600.0).run([BAD], deadline=3.0)
    assert [(one.note.signature or Signature("")).kind for one in results] == ["hung"]


def test_what_the_implementation_refuses_although_it_claims_it_is_a_failure():
    assert statuses("fuzz_faults:REFUSES_CLIP", GOOD, BAD, GOOD) == [
        ("passed", ""),
        ("suspect", "raised"),
        ("passed", ""),
    ]


def test_the_first_operation_that_diverges_is_known_when_asked():
    (result,) = Lane(default_pool(), "fuzz_faults:WRONG_IN_CLIP").run([BAD], Watch(operations=True))
    assert result.note.signature is not None
    assert result.note.signature.operation == "clip"


def test_a_model_that_outlives_its_case_is_told():
    assert statuses("fuzz_faults:KEEPS_MODELS", GOOD, models=True) == [("leaked", "leaked")]
    assert statuses("toy:UNBROKEN", GOOD, models=True) == [("passed", "")]


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
    assert batch.survivors([(0, seen)]) == []


def test_an_engine_is_asked_in_its_own_terms():
    """Its step clears gradients and it trains in float32: as the case stands, both would be reported as failures."""
    program = (micro(1), Step(), micro(2), Observe(), Step())
    assert statuses("toy_engine:UNBROKEN", case(*program, strategy="full_shard")) == [("passed", "")]


def test_what_an_implementation_warns_of_decides_nothing():
    assert statuses("fuzz_strict:WARNS", GOOD) == [("passed", "")]


def filters() -> list[str]:
    return [str(entry[0]) for entry in warnings.filters]


def test_what_a_batch_changes_in_its_ranks_does_not_outlive_it():
    """The module of this implementation makes warnings errors for the whole process when it is imported."""
    before = run_ranks(filters)
    assert "error" not in before[0]
    assert statuses("fuzz_strict:WARNS", GOOD) == [("passed", "")]
    assert run_ranks(filters) == before
