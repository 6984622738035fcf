"""Parts of a run put together: the report of one run, or a refusal that lists every part that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.cases.records import CaseOutcome, CheckResult, Request, RunReport, Verdict
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.report.merging import merged
from fsdp_testing.report.summary import report_exit_code

NAMES = ("one", "two")
CHECKS = ("s.a", "s.b", "s.c", "s.d", "s.e")
VERDICTS = {("two", "s.d"): Verdict.FAIL, ("one", "s.a"): Verdict.NOT_CLAIMED}


def result(name: str, check: str, verdict: Verdict) -> CheckResult:
    return CheckResult(name, check, "", (), verdict, cases=(CaseOutcome("c", verdict, 2, "full_shard"),))


def whole(checks=CHECKS) -> RunReport:
    results = tuple(
        result(name, check, VERDICTS.get((name, check), Verdict.PASS)) for name in NAMES for check in checks
    )
    return RunReport(results, NAMES, {"torch": "2.13.0"}, (2,), seconds=6.0, request=Request(tuple(checks)))


def parts(of: int, run: RunReport) -> dict[str, RunReport]:
    return {
        f"{number}.json": replace(run, results=run.results[number - 1 :: of], shard=(number, of), seconds=6.0 / of)
        for number in range(1, of + 1)
    }


@pytest.mark.parametrize("of", [1, 2, 3, 7, 12])
def test_the_parts_of_a_run_are_that_run(of: int):
    given = parts(of, whole())
    assert merged(dict(reversed(given.items()))) == replace(whole(), seconds=pytest.approx(6.0))
    assert RunReport.from_json(given["1.json"].to_json()) == given["1.json"]


def test_of_a_part_nothing_is_said_of_implementations_that_another_part_has():
    (one, *_) = parts(6, replace(whole(), results=whole().results[5:], implementations=("two", "elsewhere"))).values()
    assert report_exit_code(one) == 0
    assert report_exit_code(replace(one, shard=())) == 3


PARTS = parts(3, whole())
OTHER = {
    "again.json": PARTS["2.json"],
    "whole.json": whole(),
    "2.json": replace(PARTS["2.json"], environment={"torch": "2.12.0"}, world_sizes=(3,)),
    "3.json": replace(PARTS["3.json"], shard=(3, 4)),
}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["no report"]),
        ({"1.json": PARTS["1.json"]}, ["part 2 of 3 is missing", "part 3 of 3 is missing"]),
        (PARTS | {"again.json": OTHER["again.json"]}, ["part 2 of 3 2 times (2.json, again.json)"]),
        (PARTS | {"whole.json": OTHER["whole.json"]}, ["whole.json is a whole run, not a part"]),
        (PARTS | {"2.json": OTHER["2.json"]}, ["2.json has world sizes (3,), 1.json has (2,)", "torch 2.12.0"]),
        (PARTS | {"3.json": OTHER["3.json"]}, ["3.json has number of parts 4, 1.json has 3", "part 3 of 3 is missing"]),
        (
            PARTS | {"3.json": parts(3, whole(CHECKS[:4]))["3.json"]},
            ["3.json has checks 4 (s.a, s.b, s.c, ...), 1.json has 5 (s.a, s.b, s.c, ...)"],
        ),
        (
            PARTS | {"3.json": replace(PARTS["3.json"], request=Request(CHECKS, True, "abc"))},
            ["3.json has extended True, 1.json has False", "3.json has expected failures abc, 1.json has none"],
        ),
        (PARTS | {"3.json": replace(PARTS["3.json"], request=None)}, ["3.json has checks not recorded, 1.json has 5"]),
        (
            {path: replace(part, request=None) for path, part in PARTS.items()},
            ["1.json does not say which checks were requested"],
        ),
        (
            PARTS | {"3.json": replace(PARTS["3.json"], results=PARTS["2.json"].results)},
            ["3.json has one s.b, which is not of part 3 of 3"],
        ),
        (
            PARTS | {"3.json": replace(PARTS["3.json"], results=PARTS["3.json"].results * 2)},
            ["3.json has one s.c 2 times"],
        ),
    ],
)
def test_what_is_not_every_part_of_one_run_once_is_refused_with_all_that_is_wrong(given, words):
    with pytest.raises(InvalidArgument) as refused:
        merged(given)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_check_of_which_a_part_has_no_result_is_unknown():
    def without(part: RunReport) -> RunReport:
        return replace(part, results=tuple(result for result in part.results if result.verdict is not Verdict.FAIL))

    passing = {path: without(part) for path, part in PARTS.items()}
    whole_again = merged(passing)
    (unknown,) = [result for result in whole_again.results if result.verdict is Verdict.UNKNOWN]
    assert (unknown.implementation, unknown.check, unknown.explanation) == ("two", "s.d", "3.json has no result of it")
    assert len(whole_again.results) == len(NAMES) * len(CHECKS)
    assert report_exit_code(whole_again) == 3


def test_parts_with_other_faults_are_of_another_run():
    given = parts(2, whole())
    given["2.json"] = replace(given["2.json"], environment={**whole().environment, "faults": "delay=1@rank=1,step=1"})
    with pytest.raises(InvalidArgument, match=r"2\.json has injected faults delay=1@rank=1,step=1, 1\.json has none?"):
        merged(given)


def test_dates_of_every_part_are_kept():
    given = parts(2, whole())
    given = {path: replace(part, since={f"of {path}": "Monday"}) for path, part in given.items()}
    assert merged(given).since == {"of 1.json": "Monday", "of 2.json": "Monday"}


def test_the_only_part_is_the_whole_run():
    nothing = (CheckResult("one", "s.a", "", (), Verdict.NOT_CLAIMED),)
    assert report_exit_code(RunReport(nothing, ("one",), shard=(1, 1))) == 3


@pytest.mark.parametrize("verdicts", [(), (Verdict.PASS, Verdict.FAIL), (Verdict.UNKNOWN,)])
def test_a_pass_against_its_own_cases_is_a_changed_document(verdicts):
    cases = tuple(CaseOutcome("c", verdict, 2, "full_shard") for verdict in verdicts)
    report = RunReport((CheckResult("one", "s.a", "", (), Verdict.PASS, cases=cases),), ("one",))
    with pytest.raises(InvalidRecord, match="one s.a. The document was changed"):
        RunReport.from_json(report.to_json(), "report.json")


def test_parts_of_two_commits_are_no_whole():
    given = parts(2, whole())
    last = list(given)[-1]
    given[last] = replace(given[last], environment={**given[last].environment, "commit": "b1"})
    with pytest.raises(InvalidArgument, match="has commit b1, .* has none"):
        merged(given)
