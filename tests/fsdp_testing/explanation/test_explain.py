"""Planted faults are reduced to what shows them and told by their cause, checked against one process."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fsdp_testing.checkers.parity import Comparison
from fsdp_testing.conformance import run_conformance
from fsdp_testing.explanation.holding import held_before
from fsdp_testing.explanation.run import How, explain_results
from fsdp_testing.programs.runner import CaseRunner
from fsdp_testing.records import CheckResult, Explanation, Finding, History, UnitEvent, Verdict

GENEROUS = 300.0


def explained(name: str, *checks: str) -> list[Finding]:
    report = run_conformance(name, checks=checks, explain=GENEROUS)
    assert report.count(Verdict.FAIL) == len(checks), [r.explanation for r in report.results]
    return [finding for result in report.results for finding in result.findings]


def the_explanation(findings: list[Finding]) -> Explanation:
    shortest = [finding.shortest for finding in findings if finding.shortest is not None]
    assert len(shortest) == 1, [one.sentence for one in shortest]
    assert all(finding.cause for finding in findings)
    return shortest[0]


@pytest.mark.parametrize(
    ("name", "check", "told"),
    [
        ("faults_gradients:SumForMean", "training.gradients_are_means", "2 times too large, a sum over ranks"),
        ("faults_gradients:DividedTwice", "training.gradients_are_means", "divided by the number of ranks once too"),
        ("faults_gradients:OneRankIgnored", "training.gradients_are_means", "the inputs of rank 1 do not count"),
        (
            "faults_gradients:LastLocalLost",
            "accumulation.no_sync_then_reduced",
            "forward-backward in no_sync, is missing",
        ),
        ("stale_adapter:KEEPS_OLD_WEIGHTS", "forward_only.eval", "the weights from before operation"),
    ],
)
def test_the_cause_is_named(name: str, check: str, told: str) -> None:
    findings = explained(name, check)
    explanation = the_explanation(findings)
    assert told in explanation.sentence
    assert "bound" in explanation.sentence
    assert explanation.complete
    assert explanation.left_out > 0
    assert len(explanation.schedule) == len(explanation.case.program)


def test_one_root_cause_shows_once_over_several_checks() -> None:
    checks = ("training.gradients_are_means", "training.sgd_momentum", "zero_grad.both_forms")
    findings = explained("faults_gradients:SumForMean", *checks)
    assert len({finding.cause for finding in findings}) == 1
    the_explanation(findings)


def test_two_root_causes_show_twice() -> None:
    findings = explained("stale_adapter:TWO_FAULTS", "forward_only.eval", "accumulation.no_sync_then_reduced")
    assert len({finding.cause for finding in findings}) == 2


def test_an_exception_is_reduced_too() -> None:
    findings = explained("faults_state:NOT_IMPLEMENTED", "clipping.norm_2")
    explanation = the_explanation(findings)
    assert "clip(" in explanation.schedule[-1]
    assert "it claims clip_grad_norm, but every rank raised NotImplementedError: clipping is" in explanation.sentence
    assert re.search(r", at \S+toy\.py:\d+$|, at \S+faults_state\.py:\d+$", explanation.sentence)


def test_nothing_is_changed_without_time_and_no_verdict_ever() -> None:
    report = run_conformance("faults_gradients:SumForMean", checks=("training.gradients_are_means",), explain=0.0)
    (result,) = report.results
    assert all(finding.shortest is None and not finding.cause for finding in result.findings)
    runner = CaseRunner()
    (unexplained,) = explain_results((result,), lambda check: None, runner, GENEROUS)
    assert unexplained == result
    (done,) = explain_results((result,), lambda check: How(Comparison()), runner, GENEROUS)
    stripped = tuple(replace(finding, cause="", shortest=None) for finding in done.findings)
    assert replace(done, findings=stripped) == result


def test_a_death_is_not_run_again_and_again() -> None:
    report = run_conformance("faults_gradients:SumForMean", checks=("training.gradients_are_means",), explain=0.0)
    dead = replace(report.results[0].findings[0], kind="died")
    result = replace(report.results[0], findings=(dead,))
    assert isinstance(result, CheckResult)
    assert explain_results((result,), lambda check: How(Comparison()), CaseRunner(), GENEROUS) == (result,)


def test_what_is_held_when_an_operation_begins() -> None:
    def event(operation: int, unit: str, transition: str) -> UnitEvent:
        return UnitEvent(0, 0.0, operation, unit, transition)

    one = (event(0, "a", "gather"), event(0, "a", "free"), event(1, "b", "gather"), event(2, "b", "free"))
    other = (event(0, "a", "gather"), event(1, "b", "gather"))
    history = History((one, other))
    assert held_before(history, 2) == {"b": (0, 1), "a": (1,)}
    assert held_before(history, 3) == {"a": (1,), "b": (1,)}
    assert held_before(history, 0) == {}
