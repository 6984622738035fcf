"""Changes since an earlier report: new failures, fixed failures, and the first date of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import CheckResult, Finding, RunReport, Verdict
from fsdp_testing.judging.signature import as_pattern, has_cause, signature_of
from fsdp_testing.report import summary
from fsdp_testing.report.sheet import Section, bulleted, listed, numbered

TROUBLE = (Verdict.FAIL, Verdict.UNKNOWN)
BROKEN = (*TROUBLE, Verdict.EXPECTED_FAILURE)


def dated(report: RunReport, earlier: RunReport) -> RunReport:
    """Return the report with the date since which each check has not held, as far back as earlier reports go.

    A check that now fails for other causes counts as failing since this report.
    """
    others = _other_causes(report, earlier)
    known = [result for result in earlier.results if result.verdict in BROKEN and not _all_other(others, result)]
    then = {_key(result): _since(result, earlier) for result in known}
    now = {_key(result): _since(result, report) for result in report.results if result.verdict in BROKEN}
    return replace(report, since={key: then.get(key, date) for key, date in now.items()})


def comparison(report: RunReport, earlier: RunReport, name: str) -> Section:
    """Return what changed since `earlier`, which is called `name`; `report` is `dated`."""
    old = {_key(result): result for result in earlier.results}
    new = {_key(result): result for result in report.results}
    lines = tuple(_lines(old, new, report, _other_causes(report, earlier)))
    counts = [f"{numbered(len(keys), 'check')} {where}" for keys, where in _alone(old, new) if keys]
    note = ", ".join([f"compared with {name} of {_date(earlier)}", *_elsewhere(report, earlier), *counts])
    return Section("Since the earlier report", (bulleted(lines or ("No verdict changed.",)),), note, "since")


def _lines(
    old: dict[str, CheckResult], new: dict[str, CheckResult], report: RunReport, others: dict[str, _Others]
) -> Iterator[str]:
    there = {key: (old.get(key), result) for key, result in new.items() if result.verdict in TROUBLE}
    for key, (before, result) in there.items():
        if before is None or _is_worse(before.verdict, result.verdict) or key in others:
            was = f"was {summary.WORDS[before.verdict]}" if before else "was not run"
            sentence = summary.sentence(result)
            if key in others:
                was += " by another cause" if others[key].all else ", and has one more cause"
                sentence = others[key].findings[0].explanation.strip() or sentence
            yield f"new: {key} is {summary.WORDS[result.verdict]}, {was}: {sentence}"
    for key, before in old.items():
        if before.verdict in BROKEN and key in new and new[key].verdict not in BROKEN:
            was, now = summary.WORDS[before.verdict], summary.WORDS[new[key].verdict]
            left = _sizes_left_out(before, new[key])
            yield (
                f"not run: {key} was {was} on {left} ranks, is {now} on others"
                if left
                else f"gone: {key} was {was}, is {now}"
            )
    for key, (before, result) in there.items():
        known = before is not None and not _is_worse(before.verdict, result.verdict)
        if before is not None and known and not _all_other(others, before):
            yield f"still: {key} is {summary.WORDS[result.verdict]}, since {report.since[key]}"
    for key, before in old.items():
        if key not in new and before.verdict in BROKEN:
            yield f"not run: {key} was {summary.WORDS[before.verdict]}"
        elif key in new and _is_excused(before.verdict, new[key].verdict):
            yield f"changed: {key} was {summary.WORDS[before.verdict]}, is {summary.WORDS[new[key].verdict]}"
        elif key in others and new[key].verdict is before.verdict is Verdict.EXPECTED_FAILURE:
            sentence = others[key].findings[0].explanation.strip() or summary.sentence(new[key])
            yield f"changed: {key} is expected, and fails in another way than before: {sentence}"


def _is_worse(before: Verdict, after: Verdict) -> bool:
    """Whether a check fails or has no verdict now but did not before; an unknown check may be refuted now."""
    return before not in TROUBLE or (before is Verdict.UNKNOWN and after is Verdict.FAIL)


def _sizes_left_out(before: CheckResult, after: CheckResult) -> str:
    """World sizes on which a check did not hold before and did not run now, although it ran on others."""
    broken = {case.world_size for case in before.cases if case.verdict in BROKEN}
    broken |= {finding.case.world.size for finding in before.findings}
    return listed(map(str, sorted(broken - {*after.world_sizes}))) if after.world_sizes else ""


def _elsewhere(report: RunReport, earlier: RunReport) -> Iterator[str]:
    """How the settings of the earlier run differ: a failure that is missing now may simply not have been tested."""
    then, now = (listed(map(str, sorted(run.world_sizes))) for run in (earlier, report))
    if then != now:
        yield f"which ran on worlds of {then or 'no size'}, this one on {now or 'no size'}"
    if earlier.backend != report.backend:
        yield f"which ran on {earlier.backend}, this one on {report.backend}"
    if earlier.tensor_parallel != report.tensor_parallel:
        yield f"which had tensor parallelism {earlier.tensor_parallel}, this one {report.tensor_parallel}"


@dataclass(frozen=True, slots=True)
class _Others:
    """The findings of a check that resemble none in the earlier report, and whether they are all of its findings."""

    findings: tuple[Finding, ...]
    all: bool


def _other_causes(report: RunReport, earlier: RunReport) -> dict[str, _Others]:
    """Return the findings with a new cause, for each check that had findings before and has some now."""
    names, names_then = _names(report), _names(earlier)
    then = {
        _key(result): [
            (signature_of(finding), names_then.get(_cause(result, finding), "")) for finding in result.findings
        ]
        for result in earlier.results
    }
    others = {}
    for result in report.results:
        known = then.get(_key(result))
        if not known:
            continue
        unlike = []
        for finding in result.findings:
            look, name = signature_of(finding), names.get(_cause(result, finding), "")
            if not any(look == seen and _same_name(name, called) for seen, called in known):
                unlike.append(finding)
        if unlike:
            others[_key(result)] = _Others(tuple(unlike), len(unlike) == len(result.findings))
    return others


def _cause(result: CheckResult, finding: Finding) -> tuple[str, str]:
    return result.implementation, finding.cause


def _names(report: RunReport) -> dict[tuple[str, str], str]:
    """Return what was done wrong, by cause, for the causes that have a name."""
    named = {}
    for result in report.results:
        for finding in result.findings:
            happened = finding.happened or (finding.shortest.happened if finding.shortest else "")
            if finding.cause and happened:
                named[_cause(result, finding)] = happened
    return named


def _same_name(one: str, other: str) -> bool:
    return not one or not other or has_cause(one, as_pattern(other))


def _all_other(others: dict[str, _Others], result: CheckResult) -> bool:
    return _key(result) in others and others[_key(result)].all


def _is_excused(before: Verdict, after: Verdict) -> bool:
    """Whether the list of expected failures grew or a claim was dropped: either would hide a failure."""
    if after is Verdict.EXPECTED_FAILURE:
        return before is not after
    held = before in (Verdict.PASS, Verdict.STALE)
    return held and before is not after and after in (Verdict.NOT_CLAIMED, Verdict.STALE)


def _alone(old: dict[str, CheckResult], new: dict[str, CheckResult]) -> tuple[tuple[set[str], str], ...]:
    return (new.keys() - old.keys(), "only in this report"), (old.keys() - new.keys(), "only in the earlier report")


def _key(result: CheckResult) -> str:
    return f"{result.implementation} {result.check}"


def _date(report: RunReport) -> str:
    return report.environment.get("date", "unknown date")


def _since(result: CheckResult, report: RunReport) -> str:
    return report.since.get(_key(result), _date(report))
