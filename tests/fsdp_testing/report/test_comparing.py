"""What is new, what is gone and since when the rest is there, over more than one earlier report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from fsdp_testing.cases.records import CaseOutcome, Finding, RunReport, Verdict
from fsdp_testing.report.comparing import comparison, dated
from fsdp_testing.report.conformance import complete_sheet, short_sheet
from fsdp_testing.report.html import html_text


def lines(report: RunReport, earlier: RunReport) -> list[str]:
    (listed,) = comparison(report, earlier, "OLD.json").blocks
    return [line.text for line in listed.blocks]


def test_new_gone_and_still_there_since_the_first_report_that_had_it(make: SimpleNamespace) -> None:
    def report(date: str, **verdicts: Verdict) -> RunReport:
        results = tuple(
            make.result("a", f"s.{name}", verdict, explanation=f"{name} is so") for name, verdict in verdicts.items()
        )
        return RunReport(results, environment={"date": date})

    first = report("Monday", old=Verdict.FAIL, mended=Verdict.FAIL, known=Verdict.EXPECTED_FAILURE, lost=Verdict.PASS)
    second = dated(report("Tuesday", old=Verdict.FAIL, mended=Verdict.FAIL, known=Verdict.EXPECTED_FAILURE), first)
    second = RunReport.from_json(second.to_json())
    third = report("Friday", old=Verdict.UNKNOWN, mended=Verdict.PASS, known=Verdict.FAIL, added=Verdict.FAIL)
    third = dated(third, second)
    assert lines(third, second) == [
        "new: a s.known is FAIL, was expected: known is so",
        "new: a s.added is FAIL, was not run: added is so",
        "gone: a s.mended was FAIL, is pass",
        "still: a s.old is unknown, since Monday",
    ]
    assert third.since == {"a s.old": "Monday", "a s.known": "Monday", "a s.added": "Friday"}
    section = comparison(third, first, "OLD.json")
    assert section.note == (
        "compared with OLD.json of Monday, 1 check only in this report, 1 check only in the earlier report"
    )
    assert "still: a s.old is unknown, since Monday" in html_text(complete_sheet(third, section))
    assert section in short_sheet(third, section).sections


def test_what_is_excused_now_or_not_run_any_more_is_told(make: SimpleNamespace) -> None:
    def report(**verdicts: Verdict) -> RunReport:
        results = tuple(make.result("a", f"s.{name}", verdict) for name, verdict in verdicts.items())
        return RunReport(results, environment={"date": "Monday"})

    earlier = report(
        grown=Verdict.PASS, listed=Verdict.FAIL, dropped=Verdict.PASS, skipped=Verdict.FAIL, good=Verdict.PASS
    )
    later = report(
        grown=Verdict.EXPECTED_FAILURE, listed=Verdict.EXPECTED_FAILURE, dropped=Verdict.NOT_CLAIMED, good=Verdict.PASS
    )
    assert lines(dated(later, earlier), earlier) == [
        "changed: a s.grown was pass, is expected",
        "changed: a s.listed was FAIL, is expected",
        "changed: a s.dropped was pass, is not claimed",
        "not run: a s.skipped was FAIL",
    ]


def test_a_check_that_fails_by_another_cause_is_new_and_not_as_old_as_the_one_before(make: SimpleNamespace) -> None:
    def report(date: str, *findings: Finding) -> RunReport:
        return RunReport((make.result("a", "s.one", Verdict.FAIL, findings=findings),), environment={"date": date})

    def named(happened: str) -> Finding:
        return make.diverged(cause="1", happened=happened, explanation=f"{happened} is so")

    gradient = make.diverged()
    norm = make.diverged(quantity="total_norm", sort="total_norm", explanation="the norm is off")
    first = report("Monday", gradient)
    second = dated(report("Tuesday", norm), first)
    assert lines(second, first) == ["new: a s.one is FAIL, was FAIL by another cause: the norm is off"]
    assert second.since == {"a s.one": "Tuesday"}
    # One cause more is told, and the check is as old as it was.
    third = dated(report("Friday", norm, gradient), second)
    assert lines(third, second) == [
        f"new: a s.one is FAIL, was FAIL, and has one more cause: {gradient.explanation}",
        "still: a s.one is FAIL, since Tuesday",
    ]
    # Two that look alike are told apart by what was done wrong, where that is known of both.
    doubled, halved = report("Sunday", named("it is divided by 2 ranks")), report("Today", named("it is not reduced"))
    assert lines(dated(halved, doubled), doubled) == [
        "new: a s.one is FAIL, was FAIL by another cause: it is not reduced is so"
    ]
    assert lines(dated(doubled, report("Sunday", named("it is divided by 3 ranks"))), first) == [
        "still: a s.one is FAIL, since Sunday"
    ]


def test_the_same_again_is_no_news(good: RunReport) -> None:
    assert lines(dated(good, good), good) == ["No verdict changed."]


def test_what_was_unknown_and_is_refuted_now_is_new(make: SimpleNamespace) -> None:
    def report(date: str, verdict: Verdict) -> RunReport:
        return RunReport((make.result("a", "s.one", verdict, explanation="it is off"),), environment={"date": date})

    unknown = report("Monday", Verdict.UNKNOWN)
    assert lines(dated(report("Friday", Verdict.FAIL), unknown), unknown) == [
        "new: a s.one is FAIL, was unknown: it is off"
    ]


def test_a_list_that_has_grown_by_another_failure_of_a_listed_check_is_told(make: SimpleNamespace) -> None:
    def report(*findings: Finding) -> RunReport:
        return RunReport((make.result("a", "s.one", Verdict.EXPECTED_FAILURE, findings=findings),))

    gradient = make.diverged()
    norm = make.diverged(quantity="total_norm", sort="total_norm", explanation="the norm is off")
    later = dated(report(gradient, norm), report(gradient))
    assert lines(later, report(gradient)) == [
        "changed: a s.one is expected, and fails in another way than before: the norm is off"
    ]


def test_a_claim_that_was_dropped_while_its_entry_was_stale_is_told(make: SimpleNamespace) -> None:
    stale, dropped = (
        RunReport((make.result("a", "s.one", verdict),)) for verdict in (Verdict.STALE, Verdict.NOT_CLAIMED)
    )
    assert lines(dated(dropped, stale), stale) == ["changed: a s.one was stale, is not claimed"]


def test_a_failure_on_ranks_that_were_not_asked_again_is_not_gone(make: SimpleNamespace) -> None:
    def report(verdict: Verdict, *sizes: int) -> RunReport:
        cases = tuple(CaseOutcome("c", verdict if size == sizes[-1] else Verdict.PASS, size, "fsdp") for size in sizes)
        return RunReport((make.result("a", "s.one", verdict, cases=cases),), world_sizes=sizes)

    three, two = report(Verdict.FAIL, 2, 3), report(Verdict.PASS, 2)
    assert lines(dated(two, three), three) == ["not run: a s.one was FAIL on 3 ranks, is pass on others"]
    assert "which ran on worlds of 2, 3, this one on 2" in str(comparison(two, three, "OLD.json").note)
    assert lines(dated(report(Verdict.PASS, 2, 3), three), three) == ["gone: a s.one was FAIL, is pass"]


def test_another_backend_and_tensor_parallelism_are_told(good: RunReport) -> None:
    other = replace(good, backend="nccl", tensor_parallel=2)
    note = str(comparison(other, good, "OLD.json").note)
    assert "which ran on gloo, this one on nccl, which had tensor parallelism 1, this one 2" in note
