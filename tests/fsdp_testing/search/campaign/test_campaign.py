"""Campaigns find planted faults, nearly all within 500 cases, find nothing where nothing is, and tell each defect once."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import faults_gradients  # noqa: F401 - registers its faults
import faults_state  # noqa: F401 - registers its faults
import pytest
from fault import FAULTS
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case, FailureKind, Judgement, Step, Verdict, ZeroGrad
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.judging.known import CaseFeatures, KnownFailures, Rule
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.judging.tags import tokens
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search import investigation
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.case_queue import QueuedCase
from fsdp_testing.search.campaign.tally import CampaignTally
from fsdp_testing.search.campaign.writing import STATE_FILE, write_discovery
from fsdp_testing.search.investigation import AT_FIRST, LATER_ONE_IN, LookAlikes
from fsdp_testing.search.state import read_state

SOME = {
    "faults_gradients:SumForMean": "as if the sum over ranks were divided by 1 instead of 2",
    "faults_gradients:LastLocalLost": "lacks (micro-batch 1 of operation 0|operation 1, forward-backward in no_sync)",
    "faults_gradients:OneUlp": "but for one unit in the last place|the gradient of its \\w+ is wrong",
}
"""Planted faults with what is told of them, in the words of the cases that may be drawn first."""
RARE = {"faults_gradients:NewStorageDropsGradients": 1500}
"""Planted faults that take more: new storage between a local micro-batch and a reduced one is met in case 1,344."""
OTHERS = [name for name in FAULTS if name.startswith(("faults_gradients:", "faults_state:")) and name not in SOME]


def campaign(
    name: str, state: Path, examples: int, known: KnownFailures = KnownFailures(), **plan: bool
) -> CampaignTally:
    def ignore(_found: Discovery, _state: object) -> None:
        pass

    adapter = registry.load(name)
    scope = Scope(adapter.capabilities)
    asked = Plan(adapter, scope, state, seconds=None, examples=examples, lanes=1, known=known, **plan)  # type: ignore[arg-type]  # flags only
    return Campaign(asked, default_pool(), lambda _: None, ignore).run()


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_planted_fault_is_found(name: str, tmp_path: Path):
    tally = campaign(name, tmp_path, RARE.get(name, 500), stop_at_first=True)
    found = [discovery for discovery in tally.discovered if discovery.confirmed]
    assert found, FAULTS[name].story
    assert len(found[0].case.program) <= 4, found[0].case.program
    if name in SOME:
        assert re.search(SOME[name], found[0].cause), found[0].cause
        if name != "faults_gradients:OneUlp":
            assert re.search(r"; .*the gradient of its \w+ is wrong", found[0].cause), found[0].cause


def test_a_finding_that_cannot_be_explained_is_kept_without_a_cause(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> str:
        raise ZeroDivisionError("in the explanation")

    monkeypatch.setattr(investigation, "cause_of", fails)
    with pytest.warns(RuntimeWarning, match="torch-ddp: a finding is not explained: ZeroDivisionError: in the expl"):
        assert investigation.explained(CaseRunner(default_pool()), "torch-ddp", case(micro(1))) == ""


def test_equal_micro_batches_are_told_apart_before_the_cause_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    """What zero_grad leaves of a gradient was "2 times the right values", and so no known failure, where both were equal."""
    asked: list[Case] = []

    def cause_of(_runner: object, _name: str, met: Case) -> str:
        asked.append(met)
        return "" if len(asked) == 1 else "it is there"

    monkeypatch.setattr(investigation, "cause_of", cause_of)
    met = case(micro(1), ZeroGrad(), micro(1))
    assert investigation.explained(CaseRunner(default_pool()), "torch-ddp", met) == "it is there"
    assert asked == [case(micro(1), ZeroGrad(), micro(2)), met]


def test_nothing_is_found_where_nothing_is(tmp_path: Path):
    tally = campaign("toy:UNBROKEN", tmp_path, 60)
    assert not tally.discovered, tally.discovered[0].sentence()
    assert tally.run == sum(tally.verdicts.values()) == tally.drawn == 60
    assert set(tally.verdicts) == {Verdict.PASS}, tally.unjudged


def test_a_defect_is_reported_once_then_counted_and_dropped_once_its_example_passes(tmp_path: Path):
    tally = campaign("fuzz_faults:WRONG_IN_CLIP", tmp_path, 64)
    confirmed = [discovery for discovery in tally.discovered if discovery.confirmed]
    assert 1 <= len(confirmed) <= 3
    assert tokens(confirmed[0].case) == ("forward_backward", "clip")
    assert tally.known[confirmed[0].name]
    assert tally.discarded == 0
    known = KnownFailures((confirmed[0].rule(),))
    counting = campaign("fuzz_faults:WRONG_IN_CLIP", tmp_path / "known", 24, known)
    assert not counting.gone
    assert counting.known[confirmed[0].name]
    assert confirmed[0].name not in [found.name for found in counting.discovered]
    assert campaign("toy:UNBROKEN", tmp_path / "mended", 8, known).gone == [confirmed[0].name]


def test_a_finding_as_plain_as_one_micro_batch_discards_no_case(tmp_path: Path):
    """Nearly every case has it; each is run and judged all the same, also in a later campaign and after it is mended."""
    plain = campaign("fuzz_faults:WRONG_MEAN", tmp_path, 24)
    assert ("forward_backward",) in [tokens(found.case) for found in plain.discovered]
    assert (plain.drawn, plain.run - plain.variants, plain.discarded) == (24, 24, 0)
    assert plain.verdicts[Verdict.EXPECTED_FAILURE] > 6
    later = campaign("fuzz_faults:WRONG_MEAN", tmp_path, 8)
    assert (later.run - later.variants, later.discarded) == (8, 0)
    assert not later.gone
    finding = next(found for found in plain.discovered if tokens(found.case) == ("forward_backward",))
    mended = campaign("toy:UNBROKEN", tmp_path / "mended", 8, KnownFailures((finding.rule(),)))
    assert mended.gone == [finding.name]
    assert mended.verdicts == {Verdict.PASS: 8}


@pytest.mark.parametrize(("again", "confirmed"), [(Verdict.FAIL, True), (Verdict.PASS, False)])
def test_what_fails_alone_each_time_is_confirmed_although_the_shortest_case_holds(
    again: Verdict, confirmed: bool, monkeypatch: pytest.MonkeyPatch
):
    """It was told as what failed once and not alone: unknown."""
    met, short = case(micro(1), Step()), case(micro(1))
    off = finding(met, FailureKind.RAISED, "RuntimeError", 0, "off", ranks=(0,))
    fails, holds = Judgement(Verdict.FAIL, off), Judgement(Verdict.PASS)
    given = [(met, fails), (short, holds), (met, fails if again is Verdict.FAIL else holds)]

    def judge_batch(_name: str, cases: list[Case], _watch: object) -> list[JudgedCase]:
        expected, judgement = given.pop(0)
        assert cases == [expected]
        return [JudgedCase(expected, judgement)]

    runner = SimpleNamespace(impatient=lambda: SimpleNamespace(judge_batch=judge_batch))
    monkeypatch.setattr(investigation, "attempts_on", lambda *_: None)
    monkeypatch.setattr(investigation, "shrink", lambda *_: SimpleNamespace(case=short, attempts=1, seconds=0.0))
    asker = investigation.Investigator("it", shape=lambda other: other, fair=lambda _: True, seconds=1.0)
    suspect = investigation.Suspect(met, signature_of(off), "off")
    found = asker.investigate(runner, suspect, KnownFailures())  # type: ignore[arg-type]  # runs nothing
    assert found is not None
    assert found.discovery is not None
    assert (found.discovery.confirmed, found.discovery.case) == (confirmed, met)


@pytest.mark.parametrize(
    ("cause", "is_known"),
    [
        ("the gradient of b is 2 times the right values; `b` is wrong", True),
        ("it is of another rank", False),
        ("", False),
    ],
)
def test_a_failure_that_looks_known_is_known_by_its_cause(monkeypatch: pytest.MonkeyPatch, cause: str, is_known: bool):
    monkeypatch.setattr(investigation, "cause_of", lambda *_: cause)
    asker = investigation.Investigator("torch-ddp", lambda case: case, lambda case: True, 1.0)
    met = case(micro(1))
    off = finding(met, FailureKind.DIVERGED, "gradient", 0, "off", ranks=(0,))
    looks = signature_of(off)
    caused = Discovery(
        "it", looks, met, met, "off", cause="the gradient of a (and of 3 more) is 2 times the right values"
    )
    alone = JudgedCase(met, Judgement(Verdict.FAIL, off))
    known = asker._recognized(CaseRunner(default_pool()), alone, KnownFailures((caused.rule(),)))
    assert (known is not None) is is_known


def test_what_an_earlier_run_found_is_a_failure_each_time_it_is_met(tmp_path: Path):
    """Also where it is known by its looks alone, and its example did not run this time."""
    met = case(micro(1))
    off = finding(met, FailureKind.DIVERGED, "gradient", 0, "off", ranks=(0,))
    earlier = Discovery("toy:UNBROKEN", signature_of(off), met, met, "off")
    write_discovery(earlier, tmp_path)
    adapter = registry.load("toy:UNBROKEN")
    run = Campaign(
        Plan(adapter, Scope(adapter.capabilities), tmp_path), default_pool(), lambda _: None, lambda *_: None
    )
    number = run.verdicts.add_case()
    assert not run._take_result(QueuedCase(met, number), JudgedCase(met, Judgement(Verdict.FAIL, off)))
    assert (run.tally.known[earlier.name], run.tally.found_before[earlier.name]) == (1, 1)
    assert run.tally.exit_code == 1


def test_a_suspect_that_nobody_looked_at_before_the_end_runs_again_in_the_next_run(tmp_path: Path):
    """It has a failure and no finding; the next run passed, and never said a word of it."""
    adapter = registry.load("toy:UNBROKEN")
    plan = Plan(adapter, Scope(adapter.capabilities), tmp_path)

    def begun() -> Campaign:
        return Campaign(plan, default_pool(), lambda _: None, lambda *_: None)

    met = case(micro(1))
    off = finding(met, FailureKind.DIVERGED, "gradient", 0, "off", ranks=(0,))
    failed, passed = (JudgedCase(met, Judgement(*given)) for given in ((Verdict.FAIL, off), (Verdict.PASS,)))
    first = begun()
    queued = [QueuedCase(met, first.verdicts.add_case()) for _ in range(3)]
    variant = QueuedCase(met, None, 1, origin=2)
    first.take([(queued[0], passed), (queued[1], failed), (queued[2], passed), (variant, failed)])
    first.save()
    state = read_state(tmp_path / STATE_FILE)
    assert (state.verdicts, state.counts()[Verdict.FAIL]) == ("pfp", 2), "`merge` counts failures"
    assert (state.suspects, state.suspect_variants) == ((1, 2), 1)
    again = begun()
    assert again.verdicts.letters == "p.."
    assert [again._queue._next_number() for _ in range(2)] == [1, 2]
    again.save()
    assert read_state(tmp_path / STATE_FILE).counts() == {Verdict.PASS: 1}


@pytest.mark.parametrize(("without", "known"), [(Verdict.PASS, True), (Verdict.FAIL, False), (Verdict.UNKNOWN, False)])
def test_wrong_numbers_without_a_cause_are_known_where_they_are_gone_without_what_brings_them_about(
    without: Verdict, known: bool
):
    looks = Signature(FailureKind.DIVERGED, "gradient", "step")
    rule = Rule(
        "r", "why", signatures=((*looks, "a cause that nobody found"),), operations=("zero_grad",), without="zero_grad"
    )
    failing = case(micro(1), ZeroGrad(), Step())
    ran: list[Case] = []

    def judge_batch(_name: str, cases: list[Case], _watch: object) -> list[SimpleNamespace]:
        ran.extend(cases)
        return [SimpleNamespace(verdict=without)]

    runner = SimpleNamespace(impatient=lambda: SimpleNamespace(judge_batch=judge_batch))
    kept = SimpleNamespace(signature=looks, case=failing, features=CaseFeatures(failing, 2))
    investigator = investigation.Investigator("it", shape=lambda other: other, fair=lambda _: True, seconds=1.0)
    assert (investigator._gone_without(runner, kept, KnownFailures((rule,))) is rule) is known
    assert [operation.kind for operation in ran[0].program] == ["forward_backward", "step"]


def look(index: int = 0) -> Signature:
    return Signature(FailureKind.DIVERGED, "value", ("step", "reload")[index])


def test_failures_that_look_alike_are_all_investigated_until_one_of_them_is_a_finding():
    """The fourth failure of a kind made a campaign fail although the first three were known, and nobody saw why."""
    look_alikes = LookAlikes()
    assert all(look_alikes.must_be_investigated(look()) for _ in range(AT_FIRST + 5))
    look_alikes.add_finding(look())
    assert [look_alikes.must_be_investigated(look()) for _ in range(3)] == [False] * 3
    assert look_alikes.must_be_investigated(look(1)), "another one"


def test_after_a_finding_one_in_many_is_investigated_still():
    look_alikes = LookAlikes(at_first=1)
    look_alikes.add_finding(look())
    asked = [look_alikes.must_be_investigated(look()) for _ in range(2 * LATER_ONE_IN)]
    assert [number for number, each in enumerate(asked, 1) if each] == [1, LATER_ONE_IN, 2 * LATER_ONE_IN]
