"""What changed since an earlier report: which failures are new, which are gone, and since when the others are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_testing.cases.records import CheckResult, RunReport, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.sheet import Section, bulleted, numbered

TROUBLE = (Verdict.FAIL, Verdict.UNKNOWN)
BROKEN = (*TROUBLE, Verdict.EXPECTED_FAILURE)


def dated(report: RunReport, earlier: RunReport) -> RunReport:
    """Return the report with the date since when each check does not hold, as far back as earlier reports say it."""
    then = {_key(result): _since(result, earlier) for result in earlier.results if result.verdict in BROKEN}
    now = {_key(result): _since(result, report) for result in report.results if result.verdict in BROKEN}
    return replace(report, since={key: then.get(key, date) for key, date in now.items()})


def comparison(report: RunReport, earlier: RunReport, name: str) -> Section:
    """Return what changed since `earlier`, which is called `name`; `report` is `dated`."""
    old = {_key(result): result for result in earlier.results}
    new = {_key(result): result for result in report.results}
    lines = tuple(_lines(old, new, report))
    counts = [f"{numbered(len(keys), 'check')} {where}" for keys, where in _alone(old, new) if keys]
    note = ", ".join([f"compared with {name} of {_date(earlier)}", *counts])
    return Section("Since the earlier report", (bulleted(lines or ("No verdict changed.",)),), note, "since")


def _lines(old: dict[str, CheckResult], new: dict[str, CheckResult], report: RunReport) -> Iterator[str]:
    there = {key: (old.get(key), result) for key, result in new.items() if result.verdict in TROUBLE}
    for key, (before, result) in there.items():
        if before is None or before.verdict not in TROUBLE:
            was = f"was {summary.WORDS[before.verdict]}" if before else "was not run"
            yield f"new: {key} is {summary.WORDS[result.verdict]}, {was}: {summary.sentence(result)}"
    for key, before in old.items():
        if before.verdict in BROKEN and key in new and new[key].verdict not in BROKEN:
            yield f"gone: {key} was {summary.WORDS[before.verdict]}, is {summary.WORDS[new[key].verdict]}"
    for key, (before, result) in there.items():
        if before is not None and before.verdict in TROUBLE:
            yield f"still: {key} is {summary.WORDS[result.verdict]}, since {report.since[key]}"
    for key, before in old.items():
        if key not in new and before.verdict in BROKEN:
            yield f"not run: {key} was {summary.WORDS[before.verdict]}"
        elif key in new and _is_excused(before.verdict, new[key].verdict):
            yield f"changed: {key} was {summary.WORDS[before.verdict]}, is {summary.WORDS[new[key].verdict]}"


def _is_excused(before: Verdict, after: Verdict) -> bool:
    """Whether a list that has grown, or a claim that was dropped, is all that changed: either would hide a failure."""
    if after is Verdict.EXPECTED_FAILURE:
        return before is not after
    return before is Verdict.PASS and after not in (Verdict.PASS, *TROUBLE)


def _alone(old: dict[str, CheckResult], new: dict[str, CheckResult]) -> tuple[tuple[set[str], str], ...]:
    return (new.keys() - old.keys(), "in this report alone"), (old.keys() - new.keys(), "in the earlier one alone")


def _key(result: CheckResult) -> str:
    return f"{result.implementation} {result.check}"


def _date(report: RunReport) -> str:
    return report.environment.get("date", "unknown date")


def _since(result: CheckResult, report: RunReport) -> str:
    return report.since.get(_key(result), _date(report))
