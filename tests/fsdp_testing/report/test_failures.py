"""One root cause shows once, with the checks that it breaks; what was never shown to be the same is not put together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from fsdp_testing.cases.records import Explanation, RunReport, Verdict
from fsdp_testing.report.failures import causes, explanation_line


def explanation(make: SimpleNamespace, **fields: object) -> Explanation:
    values = {
        "sentence": "After forward-backward: it is wrong.",
        "schedule": ("0 forward_backward(batch 1)",),
        "case": make.case,
        "left_out": 1,
        "runs": 3,
        "seconds": 0.5,
        "complete": True,
    }
    return Explanation(**{**values, **fields})  # type: ignore[arg-type]  # fields by name


def test_findings_of_one_cause_are_one(make: SimpleNamespace) -> None:
    said = make.diverged(cause="x", shortest=explanation(make))
    other = make.diverged(cause="x", quantity="gradient of another.weight")
    results = (
        make.result("one", "a.b", Verdict.FAIL, findings=(said,)),
        make.result("one", "c.d", Verdict.FAIL, findings=(other, other)),
        make.result("two", "a.b", Verdict.FAIL, findings=(other,)),
    )
    first, second = causes(RunReport(results))
    assert (first.implementation, second.implementation) == ("one", "two")
    assert [result.check for result in first.results] == ["a.b", "c.d"]
    assert first.sentence == "After forward-backward: it is wrong."
    assert len(first.findings) == 3
    assert second.sentence == other.explanation
    assert first.scope == "3 failing cases: mlp; full_shard"


def test_without_explanations_only_the_very_same_is_put_together(make: SimpleNamespace) -> None:
    finding = make.diverged()
    other_strategy = replace(finding.case, strategy="no_shard")
    elsewhere = replace(finding, case=other_strategy, max_error=0.37000001)
    results = (
        make.result("one", "a.b", Verdict.FAIL, findings=(finding, elsewhere)),
        make.result("one", "c.d", Verdict.FAIL, findings=(replace(finding, max_error=9.0),)),
    )
    found = causes(RunReport(results))
    assert [len(cause.findings) for cause in found] == [2, 1]
    assert [result.check for result in found[0].results] == ["a.b", "c.d"]
    # Another strategy with the same account and the same error to the bit is the same.
    same = make.result("one", "e.f", Verdict.FAIL, findings=(finding, replace(finding, case=other_strategy)))
    known = make.result("one", "g.h", Verdict.EXPECTED_FAILURE, findings=(replace(finding, case=other_strategy),))
    assert [len(cause.findings) for cause in causes(RunReport((same, known)))] == [2, 1]


def test_what_was_expected_comes_last(make: SimpleNamespace) -> None:
    expected = make.result("one", "a.b", Verdict.EXPECTED_FAILURE, findings=(make.diverged(cause="x"),))
    failed = make.result("one", "c.d", Verdict.FAIL, findings=(make.diverged(cause="y"),))
    found = causes(RunReport((expected, failed)))
    assert [cause.expected for cause in found] == [False, True]
    mixed = make.result("one", "c.d", Verdict.FAIL, findings=(make.diverged(cause="x"),))
    assert [cause.expected for cause in causes(RunReport((expected, mixed)))] == [False]


def test_a_report_without_failures_has_none(good: RunReport) -> None:
    assert causes(good) == ()


def test_how_the_schedule_was_found(make: SimpleNamespace) -> None:
    line = explanation_line(explanation(make))
    assert line == "1 operation remains, 1 left out; each that remains is needed (3 runs, 0.5 s)"
    assert "not all were tried (time)" in explanation_line(explanation(make, complete=False))
