"""What an earlier run found is asked again, and no success until its example passes; what is known of it hides nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case, FailureKind, Judgement, Verdict, ZeroGrad
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.case_queue import QueuedCase
from fsdp_testing.search.campaign.writing import write_discovery
from fsdp_testing.search.investigation import Investigated

MET = replace(case(micro(1)), strategy="full_shard")


def fails(kind: FailureKind) -> Judgement:
    return Judgement(Verdict.FAIL, finding(MET, kind, "gradient", 0, "off", ranks=(0,)))


DIVERGES = fails(FailureKind.DIVERGED)


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (DIVERGES, 1),
        (Judgement(Verdict.UNKNOWN, reason="why"), 3),
        (fails(FailureKind.DIED), 3),
        (Judgement(Verdict.PASS), 0),
    ],
)
@pytest.mark.parametrize("turns", [{}, {"ran": 1}])
def test_a_short_run_after_a_finding_says_what_became_of_it(
    now: Judgement, code: int, turns: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its example stood in a chunk with those of shipped rules, which was more than a short run may take: none ran."""
    assert DIVERGES.finding is not None
    earlier = Discovery("torch-fsdp2", signature_of(DIVERGES.finding), MET, MET, "off")
    write_discovery(earlier, tmp_path)
    asked: list[Case] = []

    def judge_batch(_runner: CaseRunner, _name: object, cases: Sequence[Case], *_: object) -> list[JudgedCase]:
        asked.extend(cases)
        return [JudgedCase(each, now if each == MET else Judgement(Verdict.PASS)) for each in cases]

    monkeypatch.setattr(CaseRunner, "judge_batch", judge_batch)
    adapter = registry.load("torch-fsdp2")
    plan = Plan(adapter, Scope(adapter.capabilities), tmp_path, None, 6, known=shipped_known(adapter.built_on))
    run = Campaign(plan, default_pool(), lambda _: None, lambda *_: None)
    run._turns = {earlier.name: 1} if turns else {}
    tally = run.run()
    assert asked[0] == MET
    assert tally.exit_code == code
    assert tally.gone == ([earlier.name] if not code else tally.gone)
    assert tally.examples[0] <= 2


def begun(state: Path, known: KnownFailures = KnownFailures()) -> Campaign:
    adapter = registry.load("torch-fsdp2")
    plan = Plan(adapter, Scope(adapter.capabilities), state, known=known)
    return Campaign(plan, default_pool(), lambda _: None, lambda *_: None)


@pytest.mark.parametrize(("tags", "watched"), [((), False), (("strategy:full_shard",), True)])
def test_a_known_leak_of_some_cases_does_not_end_the_watch_on_others(
    tags: tuple[str, ...], watched: bool, tmp_path: Path
):
    leaked = finding(MET, FailureKind.LEAKED, "model", 1, "left behind", ranks=(0,), sort="model")
    run = begun(tmp_path, KnownFailures((Rule("stays", "why", signatures=(("leaked", "model"),), tags=tags),)))
    met = QueuedCase(MET, run.verdicts.add_case())
    assert not run._take_result(met, JudgedCase(MET, Judgement(Verdict.FAIL, leaked)))
    assert run.tally.known == {"stays": 1}
    assert run._watch_models is watched


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_known_once_it_is_short_runs_without_what_brings_that_about(alone: bool, tmp_path: Path):
    """A new failure in operation 0 became the known one of operation 2 when it was shortened, and was not seen again."""
    assert DIVERGES.finding is not None
    looks = signature_of(DIVERGES.finding)
    rule = Rule("known", "why", signatures=(looks,), operations=("zero_grad",), without="zero_grad")
    whole = replace(MET, program=(*MET.program, ZeroGrad(), *MET.program))
    run = begun(tmp_path, KnownFailures((rule,)))
    met = QueuedCase(whole, run.verdicts.add_case())
    run._settle(met, Verdict.FAIL)
    short = Discovery("torch-fsdp2", looks, whole, replace(MET, program=whole.program[1:]), "off")
    among_others = Signature(FailureKind.DIVERGED, "value", "step")
    run._take_investigated(met, Investigated(among_others if alone else looks, None if alone else short, rule))
    assert run.verdicts.letters == "e"
    ((variant,),) = run._queue._waiting.values()
    assert [operation.kind for operation in variant.case.program] == ["forward_backward"] * 2
    assert variant.origin == met.number


@pytest.mark.parametrize("earlier", [False, True])
def test_only_what_the_campaign_itself_reports_spares_failures_that_look_alike(earlier: bool, tmp_path: Path):
    assert DIVERGES.finding is not None
    looks = signature_of(DIVERGES.finding)
    rule = Rule("known", "why", signatures=(looks,), operations=("zero_grad",))
    run = begun(tmp_path, KnownFailures((rule,)))
    run._earlier = {"known"} if earlier else set()
    met = QueuedCase(MET, run.verdicts.add_case())
    run._settle(met, Verdict.FAIL)
    run._take_investigated(met, Investigated(looks, None, rule))
    assert (run.tally.known, run.tally.duplicates) == (({}, {"known": 1}) if earlier else ({"known": 1}, {}))
    worth = [run._is_worth_investigating(looks) for _ in range(5)]
    assert worth == [True] * 3 + [not earlier] * 2
    assert run.tally.not_investigated == (2 if earlier else 0)


def test_what_failed_once_in_an_earlier_run_is_told_when_it_is_confirmed(tmp_path: Path):
    """It had the name of the earlier one, and so it failed without a finding."""
    assert DIVERGES.finding is not None
    once = Discovery("torch-fsdp2", signature_of(DIVERGES.finding), MET, MET, "off", confirmed=False)
    write_discovery(once, tmp_path)
    told: list[Discovery] = []
    run = begun(tmp_path)
    run._on_finding = lambda discovery, _: told.append(discovery)
    run._take_discovery(once, once.signature)
    assert not told, "that was said by the earlier run"
    run._take_discovery(replace(once, confirmed=True), once.signature)
    assert [discovery.confirmed for discovery in told] == [True]
