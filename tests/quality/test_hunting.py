"""A hunt meets a planted bug, counts what it took, and takes nothing for it that the sound implementation fails too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import hunting
import pytest
from every_fault import FAULTS
from hunting import RANDOM_CASES, drawn_bugs, hunt, own_bugs
from proving import BUGS

from fsdp_testing.cases.records import Batch, Case, Clip, ForwardBackward, ModelSpec, WorldSpec
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.campaign.campaign import Plan

SOUND = "fsdp_ref-wrapper"


def test_the_seed_chooses_the_exhibits():
    first = drawn_bugs(10, 7)
    assert first == drawn_bugs(10, 7)
    assert len(set(first)) == 10
    assert first != drawn_bugs(10, 8)
    assert all(FAULTS[name].fuzzed for name in first)


@pytest.mark.parametrize("count", [0, 1000])
def test_no_more_than_there_are(count: int):
    with pytest.raises(InvalidArgument, match="expected 1 to"):
        drawn_bugs(count, 0)


@pytest.mark.slow  # campaigns meet planted faults every time: tests/fsdp_testing/search/campaign
@pytest.mark.parametrize("name", [number for number, name in BUGS.items() if FAULTS[name].fuzzed])
def test_a_bug_is_met(name: str):
    ended = hunt(BUGS[name], 1)
    assert ended.cases is not None, f"{ended.run} random cases; {ended.sentence}"
    assert ended.cases <= RANDOM_CASES
    assert ended.case is not None


def test_nothing_is_met_where_no_bug_is_planted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FAULTS, SOUND, replace(FAULTS[BUGS["B147"]], adapter=None))
    ended = hunt(SOUND, 1, limit=48)
    assert ended.cases is None, ended.sentence
    assert ended.run >= 40


def test_what_the_sound_reference_fails_too_is_not_the_bug():
    case = Case(
        model=ModelSpec("tree", tree={"width": 4, "nodes": [{"kind": "linear", "name": "a"}]}),
        world=WorldSpec(2),
        program=(ForwardBackward(Batch(1)), Clip(0.1)),
    )
    bug = BUGS["B147"]
    found = Discovery(bug, Signature("diverged", "gradient", "clip"), case, case, "clipped by too little")
    assert own_bugs([found], SOUND, default_pool()) == [found]
    assert own_bugs([found], bug, default_pool()) == []


def test_a_hunt_goes_on_past_what_the_sound_reference_fails_too(monkeypatch: pytest.MonkeyPatch):
    case = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(1)),))
    both, bug = (Discovery("it", Signature("raised", name, "clip"), case, case, name) for name in ("both", "bug"))
    plans: list[Plan] = []

    class Staged:
        def __init__(self, plan: Plan, *_: object) -> None:
            plans.append(plan)

        def run(self) -> SimpleNamespace:
            return SimpleNamespace(run=24, discovered=[both if len(plans) == 1 else bug])

    monkeypatch.setattr(hunting, "Campaign", Staged)
    monkeypatch.setattr(hunting, "own_bugs", lambda met, sound, worlds: [found for found in met if found is bug])
    ended = hunt(BUGS["B147"], 1)
    assert (ended.cases, ended.run, ended.case) == (48, 48, case)
    assert ended.sentence == bug.sentence()
    assert [plan.examples for plan in plans] == [RANDOM_CASES, RANDOM_CASES - 24]
    assert both.rule().name in {rule.name for rule in plans[1].known.rules}
