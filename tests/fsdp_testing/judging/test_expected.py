"""A failure is expected by how it fails: kind, quantity, operation, and the parameter and cause where an entry names them."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from fsdp_testing.cases.records import (
    Batch,
    Case,
    CaseOutcome,
    CheckResult,
    Clip,
    FailureKind,
    Finding,
    ForwardBackward,
    ModelSpec,
    Verdict,
    WorldSpec,
)
from fsdp_testing.judging.expected import as_expected, read_expectation
from fsdp_testing.judging.signature import entry_line, entry_literal

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(1, (2,))), Clip(1.0)))
NORM = Finding(
    FailureKind.DIVERGED, "total norm on rank 0", 1, "clip", (0,), "the norm is off", CASE, 1.0, 0.5, sort="total_norm"
)
NEW = Finding(
    FailureKind.RAISED, "ValueError", 1, "clip", (0, 1), "every rank raised", CASE, message="expected 3, got 'x'"
)
ENTRY = {"reason": "padding is counted", "kind": "diverged", "quantity": "total_norm", "operation": "clip"}


def failed(*findings: Finding, others: tuple[Verdict, ...] = ()) -> CheckResult:
    verdicts = [*(Verdict.FAIL for _ in findings), *others]
    cases = tuple(CaseOutcome(str(number), verdict, 2, "full_shard") for number, verdict in enumerate(verdicts))
    return CheckResult("it", "clipping.norm_1", "claim", (), Verdict.FAIL, findings[0].explanation, findings, cases)


def judged(entry: object, result: CheckResult, cause: str = "") -> CheckResult:
    problems: list[str] = []
    expectation = read_expectation(entry, "'clipping.norm_1' (it)", problems)
    assert not problems
    return as_expected(result, expectation, lambda _: cause)


def test_a_new_error_in_a_check_that_is_known_to_fail_is_a_failure() -> None:
    assert judged(ENTRY, failed(NORM)).verdict is Verdict.EXPECTED_FAILURE
    result = judged(ENTRY, failed(NEW))
    assert result.verdict is Verdict.FAIL
    assert (
        result.remark
        == "the list has diverged total_norm in clip; this failure is raised ValueError: expected #, got _ in clip"
    )


def test_a_known_failure_beside_a_new_one_is_a_failure_and_the_new_one_leads() -> None:
    result = judged(ENTRY, failed(NORM, NEW))
    assert (result.verdict, result.explanation) == (Verdict.FAIL, "every rank raised")
    assert [finding.expected is None for finding in result.findings] == [True, False]
    assert result.remark.startswith("1 of its failing cases is known; ")


def test_a_list_names_every_way_and_each_finding_says_which_it_is() -> None:
    error = {**ENTRY, "kind": "raised", "quantity": "ValueError: expected #", "reason": "no padding"}
    result = judged([ENTRY, error], failed(NORM, NEW))
    assert result.verdict is Verdict.EXPECTED_FAILURE
    assert [finding.expected.reason for finding in result.findings if finding.expected] == [
        "padding is counted",
        "no padding",
    ]
    assert judged([ENTRY, error], failed(NORM)).remark.startswith(
        "listed, but no case fails in this way: raised ValueError"
    )


def test_a_reason_alone_excuses_nothing_and_the_entry_to_write_is_said() -> None:
    result = judged("padding is counted: page.md", failed(NORM))
    assert result.verdict is Verdict.FAIL
    line = result.remark.partition("write ")[2]
    (written,) = tomllib.loads(line).values()
    assert judged({**written, "reason": "padding", "page": "page.md"}, failed(NORM)).verdict is Verdict.EXPECTED_FAILURE


@pytest.mark.parametrize(
    ("finding", "entry", "cause", "verdict"),
    [
        (
            NORM,
            {"cause": "the norm of all but *"},
            "the wrong values are the norm of all but a",
            Verdict.EXPECTED_FAILURE,
        ),
        (NORM, {"cause": "the norm of all but *"}, "the wrong values are half of the right values", Verdict.FAIL),
        (NORM, {"cause": "the norm of all but *"}, "", Verdict.FAIL),
        (replace(NORM, fqn="a.weight"), {"parameter": "a.*"}, "", Verdict.EXPECTED_FAILURE),
        (replace(NORM, fqn="b.weight"), {"parameter": "a.*"}, "", Verdict.FAIL),
        (replace(NORM, kind=FailureKind.DISAGREED), {}, "", Verdict.FAIL),
    ],
)
def test_a_parameter_and_a_cause_count_where_they_are_given(
    finding: Finding, entry: dict[str, str], cause: str, verdict: Verdict
) -> None:
    result = judged({**ENTRY, **entry}, failed(finding), cause)
    assert result.verdict is verdict
    if verdict is Verdict.FAIL and cause:
        assert cause in result.remark, "the message says what the cause is"


def test_an_exception_without_a_message_is_not_any_of_its_type() -> None:
    entry = {**ENTRY, "kind": "raised", "quantity": "AssertionError: "}
    bare = replace(NEW, quantity="AssertionError", message="")
    assert judged(entry, failed(bare)).verdict is Verdict.EXPECTED_FAILURE
    assert judged(entry, failed(replace(bare, message="no shard"))).verdict is Verdict.FAIL


def test_a_cause_that_could_not_be_found_once_is_looked_for_again() -> None:
    expectation = read_expectation({**ENTRY, "cause": "twice"}, "", [])
    answers = iter(["", "the gradient is counted twice"])
    assert as_expected(failed(NORM), expectation, lambda _: next(answers)).verdict is Verdict.EXPECTED_FAILURE


@pytest.mark.parametrize(
    ("verdict", "seen"),
    [
        (Verdict.PASS, Verdict.STALE),
        (Verdict.NOT_CLAIMED, Verdict.STALE),
        (Verdict.UNKNOWN, Verdict.UNKNOWN),
    ],
)
def test_what_does_not_fail_is_stale_or_stays_unknown(verdict: Verdict, seen: Verdict) -> None:
    result = judged(ENTRY, CheckResult("it", "clipping.norm_1", "claim", (), verdict))
    assert (result.verdict, result.expected) == (seen, "padding is counted")


def test_an_unknown_case_beside_known_failures_leaves_the_check_unknown() -> None:
    assert judged(ENTRY, failed(NORM, others=(Verdict.PASS,))).verdict is Verdict.EXPECTED_FAILURE
    assert judged(ENTRY, failed(NORM, others=(Verdict.UNKNOWN,))).verdict is Verdict.UNKNOWN


def test_a_failing_case_without_a_finding_is_not_excused_by_another() -> None:
    assert judged(ENTRY, failed(NORM, others=(Verdict.FAIL,))).verdict is Verdict.FAIL
    assert judged(ENTRY, replace(failed(NORM), findings=(), cases=())).verdict is Verdict.FAIL


def test_the_entry_that_is_printed_expects_the_failure() -> None:
    caused = replace(NORM, happened="rank 1 of [2] is counted 3 times")
    result = failed(caused, NEW)
    (written,) = tomllib.loads(entry_line("clipping.norm_1", result.findings)).values()
    assert [one["kind"] for one in written] == ["diverged", "raised"]
    problems: list[str] = []
    read_expectation(written, "here", problems)
    assert len(problems) == 4
    assert problems[:2] == [
        "here: reason is still WHY; write the defect in one sentence",
        "here: page is still PAGE; write where it is described, or leave it out",
    ]
    filled = [{**entry, "reason": "known", "page": "page.md"} for entry in written]
    assert judged(filled, result, caused.happened).verdict is Verdict.EXPECTED_FAILURE
    assert eval(f"{{{entry_literal('clipping.norm_1', result.findings)}}}") == {"clipping.norm_1": written}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({**ENTRY, "kind": "diverges"}, "kind is 'diverges', and not one of diverged, disagreed"),
        ({**ENTRY, "quantity": " "}, "lacks quantity"),
        ({"reason": "why", "kind": "hung"}, ""),
        ({"reason": "why", "kind": "died"}, "lacks quantity"),
        ({**ENTRY, "kind": "raised", "quantity": "ValueError"}, "expected type and beginning of the message"),
        ({**ENTRY, "operations": "clip"}, "'operations' is none of reason, kind, quantity, operation"),
        ({**ENTRY, "cause": 3}, "cause is no text"),
        ([], "has no entry"),
        ([ENTRY, 3], "has 3, where a table of reason, kind"),
        (" ", "has no reason"),
    ],
)
def test_an_entry_has_to_say_how_it_fails(entry: object, said: str) -> None:
    problems: list[str] = []
    read_expectation(entry, "here", problems)
    assert bool(problems) == bool(said)
    assert all(said in problem for problem in problems[:1])
