"""A run in rows, tallies and sentences. Pure: sheets and JUnit show what is computed here, so they cannot disagree."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp_testing.base.documentation import page
from fsdp_testing.cases.records import (
    AXES,
    LOSES_RANKS,
    RAISES,
    Case,
    CheckResult,
    ExpectedFailure,
    FailureKind,
    Finding,
    RunReport,
    Verdict,
    merge,
)
from fsdp_testing.report.sheet import listed, numbered

# In order of interest: wrong, unclear, foreseen.
ATTENTION = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE, Verdict.EXPECTED_FAILURE)

WORDS = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "FAIL",
    Verdict.UNKNOWN: "unknown",
    Verdict.NOT_CLAIMED: "not claimed",
    Verdict.EXPECTED_FAILURE: "expected",
    Verdict.STALE: "stale",
}

MEANINGS = {
    Verdict.PASS: "the claim held in every case that ran",
    Verdict.FAIL: "the claim was refuted; the first divergence is shown",
    Verdict.UNKNOWN: "no verdict: the check, the adapter or the pool failed",
    Verdict.NOT_CLAIMED: "the implementation does not claim what the check needs; it did not run",
    Verdict.EXPECTED_FAILURE: "failed as the list of expected failures says",
    Verdict.STALE: "listed as an expected failure, but it does not fail; take it off the list",
}

EXIT_MEANINGS = {
    0: "all claims that were checked hold",
    1: "a claim was refuted",
    2: "bad usage or a bad adapter",
    3: "some claims have no verdict",
}


SEVERITIES = {
    "silent wrong training": frozenset(FailureKind) - RAISES - LOSES_RANKS,
    "loud error": RAISES | LOSES_RANKS,
    "needs memory": {FailureKind.KEPT, FailureKind.LEAKED},
    "slower": {FailureKind.EXCESS},
}
"""The cost of a failure for the user, worst first; a finding has the last cost that lists its kind."""


def severity(findings: Iterable[Finding]) -> str:
    """Return the worst cost of the findings; empty if there are none."""
    costs = {[name for name, kinds in SEVERITIES.items() if finding.kind in kinds][-1] for finding in findings}
    return next((name for name in SEVERITIES if name in costs), "")


def severities(groups: Iterable[Iterable[Finding]]) -> str:
    """Return how many groups of findings have each cost, worst first."""
    counts = Counter(map(severity, groups))
    return ", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name])


@dataclass(frozen=True, slots=True)
class Tally:
    """The results of the checks of one implementation. `asked` counts all but those not claimed."""

    implementation: str
    asked: int
    counts: dict[Verdict, int]
    cases: int
    seconds: float
    in_part: int = 0

    @property
    def sentence(self) -> str:
        """The tally in one line."""
        kept = self.counts[Verdict.PASS] + self.counts[Verdict.STALE]
        parts = [f"{kept} of {self.asked} claims hold" if self.asked else "nothing was asked"]
        words = {
            Verdict.FAIL: "refuted",
            Verdict.UNKNOWN: "unknown",
            Verdict.EXPECTED_FAILURE: "expected to fail",
            Verdict.STALE: "stale",
            Verdict.NOT_CLAIMED: "not claimed",
        }
        parts += [f"{self.counts[verdict]} {word}" for verdict, word in words.items() if self.counts[verdict]]
        parts += [f"{self.in_part} asked without the cases that need unclaimed capabilities"] if self.in_part else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Known:
    """Expected failures with one explanation: those whose entries name the same page, else the very same reason.

    Attributes:
        page: File or address that the entries name; empty if they name none.
        reason: The first reason.
        results: The checks that fail so, in the order of the run.
        threads: Other addresses that the entries name.
        findings: The failing cases.
        looks: The ways in which they fail, each with the number of cases.
    """

    page: str
    reason: str
    results: tuple[CheckResult, ...]
    threads: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    looks: tuple[tuple[str, int], ...] = ()

    @property
    def sentence(self) -> str:
        """The known failure, its implementations, and where it is documented."""
        whose = ", ".join(dict.fromkeys(result.implementation for result in self.results))
        return f"{self.reason} ({whose})" + (f": {page(self.page)}" if self.page else "")


ADDRESS = r"https?://[^\s<>\"'(),;]*[\w/]"
PAGE = re.compile(rf"{ADDRESS}|[\w./-]+\.(?:md|rst|html|py)\b")


def known_failures(report: RunReport) -> tuple[Known, ...]:
    """Return the expected failures by the page that explains them, the largest group first."""
    groups: dict[str, list[tuple[ExpectedFailure, CheckResult, Finding]]] = {}
    for result in attention(report, Verdict.EXPECTED_FAILURE):
        for finding in result.findings:
            entry = finding.expected or _entry_in(result.expected, finding)
            groups.setdefault(entry.page or entry.reason, []).append((entry, result, finding))
    return tuple(sorted(map(_known, groups.values()), key=lambda group: -len(group.results)))


def _known(members: list[tuple[ExpectedFailure, CheckResult, Finding]]) -> Known:
    entries = [entry for entry, _, _ in members]
    results = {id(result): result for _, result, _ in members}
    looks = Counter(entry.look for entry in entries)
    threads = dict.fromkeys(thread for entry in entries for thread in re.findall(ADDRESS, entry.text))
    threads.pop(entries[0].page, None)
    return Known(
        entries[0].page,
        entries[0].reason,
        tuple(results.values()),
        tuple(threads),
        tuple(finding for _, _, finding in members),
        tuple(looks.items()),
    )


def _entry_in(text: str, finding: Finding) -> ExpectedFailure:
    """The entry that a report of an earlier version stores as text: a reason, and the page that it names."""
    match = PAGE.search(text)
    if match is None:
        return ExpectedFailure(text, finding.kind)
    reason = text[: match.start()].rstrip(" :;,(") or text
    return ExpectedFailure(reason, finding.kind, page=match.group(), issue=text[match.end() :].strip(" ,;"))


def implementations(report: RunReport) -> tuple[str, ...]:
    """Return the names asked for, then any other that has results."""
    return tuple(dict.fromkeys([*report.implementations, *(result.implementation for result in report.results)]))


def by_check(report: RunReport) -> dict[str, dict[str, CheckResult]]:
    """Return check -> implementation -> result, in the order of the run."""
    cells: dict[str, dict[str, list[CheckResult]]] = {}
    for result in report.results:
        cells.setdefault(result.check, {}).setdefault(result.implementation, []).append(result)
    return {check: {name: _decisive(several) for name, several in row.items()} for check, row in cells.items()}


def _decisive(results: list[CheckResult]) -> CheckResult:
    """Return the result that decides, of several for a check on one implementation: no verdict hides a worse one."""
    worst = merge(result.verdict for result in results)
    return next(result for result in results if result.verdict is worst)


def suite_state(results: Iterable[CheckResult]) -> tuple[str, bool]:
    """Return how the checks of one suite came out, in words, and whether a reader must look at them."""
    counts = Counter(result.verdict for result in results)
    if set(counts) <= {Verdict.PASS, Verdict.NOT_CLAIMED} and Verdict.PASS in counts:
        return "all that is claimed holds", False
    words = ", ".join(f"{counts[verdict]} {WORDS[verdict]}" for verdict in Verdict if counts[verdict])
    return words, bool({Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE} & set(counts))


def suite_of(check: str) -> str:
    """Return the part of a check's name before the first dot."""
    return check.partition(".")[0]


def tallies(report: RunReport) -> tuple[Tally, ...]:
    """Return one tally per implementation."""
    return tuple(
        _tally(name, [r for r in report.results if r.implementation == name]) for name in implementations(report)
    )


def _tally(name: str, results: list[CheckResult]) -> Tally:
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in Verdict}
    return Tally(
        implementation=name,
        asked=len(results) - counts[Verdict.NOT_CLAIMED],
        counts=counts,
        cases=sum(len(result.cases) for result in results),
        seconds=sum(result.seconds for result in results),
        in_part=sum(bool(result.cases and any("claim" in reason for reason in result.not_run)) for result in results),
    )


def attention(report: RunReport, verdict: Verdict) -> tuple[CheckResult, ...]:
    """Results with this verdict, in the order of the run."""
    return tuple(result for result in report.results if result.verdict is verdict)


def report_exit_code(report: RunReport) -> int:
    """Return the documented exit code, which is 3 if no claim of a requested implementation was checked."""
    return report.exit_code or (3 if idle(report) or not report.results else 0)


def idle(report: RunReport) -> list[str]:
    """Return implementations without a checked claim; none for a part of a run, because another part may have checked them."""
    is_whole = report.shard in ((), (1, 1))
    return [tally.implementation for tally in tallies(report) if tally.asked == 0] if is_whole else []


def conclusion(report: RunReport) -> str:
    """Return what the exit code means, and for whom."""
    code = report_exit_code(report)
    unasked = idle(report)
    if code == 3 and (unasked or not report.results) and not report.count(Verdict.UNKNOWN):
        whose = f" of {', '.join(unasked)}" if unasked else ""
        whys = (f" ({r.explanation})" for r in report.results if r.implementation in unasked and r.explanation)
        return f"no claim{whose} was checked: no verdict{next(whys, '')}"
    foreseen = report.count(Verdict.EXPECTED_FAILURE)
    if code == 0 and foreseen:
        return f"no new failure; {numbered(foreseen, 'check')} failed as expected"
    return EXIT_MEANINGS[code]


def headline(report: RunReport) -> str:
    """Return what a reader should know first: how much is new, unknown and known, and how much holds."""
    failed, unknown, stale, foreseen = (report.count(verdict) for verdict in ATTENTION)
    held = report.count(Verdict.PASS) + stale
    parts = []
    if failed:
        parts.append(f"{failed} new failure{'s' if failed > 1 else ''}")
    if unknown:
        parts.append(f"{unknown} unknown")
    if foreseen:
        parts.append(f"{foreseen} known failure{'s' if foreseen > 1 else ''}" + ("" if failed else ", none new"))
    if stale:
        parts.append(f"{stale} listed as known that do{'es' if stale == 1 else ''} not fail")
    unasked = idle(report)
    if unasked or not report.results:
        parts.append(f"nothing was checked{' of ' + ', '.join(unasked) if unasked else ''}")
    if not parts:
        return f"All {held} claims that were checked hold" if held > 1 else "The one claim that was checked holds"
    return f"{', '.join(parts)}; {held} claim{'s' if held != 1 else ''} hold{'s' if held == 1 else ''}"


def sizes_run(report: RunReport) -> tuple[int, ...]:
    """Return the world sizes on which cases ran; some sizes of the run may have none."""
    return tuple(sorted({size for result in report.results for size in result.world_sizes}))


def trust(report: RunReport) -> Iterator[str]:
    """Return what was compared, how close the closest pass came, and what was not checked, a sentence each."""
    cases = [case for result in report.results for case in result.cases]
    sizes = listed(sizes_run(report)) or "no"
    compared = sum(case.comparisons for case in cases)
    yield f"{compared:,} tensors compared with those of one process, in {len(cases):,} cases on {sizes} ranks."
    for result, ratio in nearest(report, 1):
        yield f"Closest pass: {result.check} ({result.implementation}) used {100 * ratio:.3g} % of its bound."
    if unknown := report.count(Verdict.UNKNOWN):
        yield f"{numbered(unknown, 'check')} gave no verdict; that is never counted as a pass."
    if skipped := report.count(Verdict.NOT_CLAIMED):
        yield f"{numbered(skipped, 'check')} skipped: the capabilities that they need are not claimed."


def facts(report: RunReport) -> dict[str, str]:
    """Return where and how it ran, by name."""
    return {
        **report.environment,
        "backend": report.backend,
        "world sizes": listed(sizes_run(report)) or "none",
        "duration": f"{report.seconds:.1f} s",
        "checks": str(len({result.check for result in report.results})),
        "cases": str(sum(len(result.cases) for result in report.results)),
    }


def circumstances(report: RunReport) -> str:
    """Return where and how it ran, in a line."""
    sizes = listed(sizes_run(report))
    worlds = f" on worlds of {sizes}" if sizes else ""
    parts = [
        *(f"{key} {value}" for key, value in report.environment.items() if key != "command"),
        f"{report.backend}{worlds}",
    ]
    if report.tensor_parallel > 1:
        parts.append(f"tensor parallelism over {report.tensor_parallel} ranks")
    return f"{'; '.join(parts)}; {report.seconds:.1f} s in all"


# ------------------------------------------------------------------------------------------------ one failure
def size_text(finding: Finding) -> str:
    """The error against its bound; empty if the difference has no size."""
    if finding.max_error is None:
        return ""
    text = f"max error {finding.max_error:.3g}"
    if finding.bound is None:
        return text
    if finding.bound == 0:
        return f"{text}, expected equal bits"
    text += f", bound {finding.bound:.3g}"
    ratio = finding.max_error / finding.bound
    return f"{text} ({ratio:.3g} times the bound)" if math.isfinite(ratio) else text


def place_text(finding: Finding) -> str:
    """After which operation and on which ranks."""
    place = operation_place(finding)
    if not finding.ranks:
        return place
    return f"{place}, rank{'s' if len(finding.ranks) > 1 else ''} {', '.join(map(str, finding.ranks))}"


def operation_place(finding: Finding) -> str:
    """After which operation."""
    return finding.operation_text or ("while wrapping" if finding.operation < 0 else f"operation {finding.operation}")


def world_text(case: Case) -> str:
    """Return a case in a few words: model, world, strategy, dtypes."""
    parts = [case.model.name, f"{case.world.size} ranks", case.strategy, case.model.dtype]
    return ", ".join([*parts, *(text for axis in AXES if (text := axis.text(case)))])


def replay_line(result: CheckResult, report: RunReport) -> str:
    """Return the command that runs this check on this implementation again, on the world where it first failed or was unknown."""
    decisive = [finding.case.world.size for finding in result.findings]
    decisive += [case.world_size for case in result.cases if case.verdict is Verdict.UNKNOWN]
    sizes = decisive[:1] or result.world_sizes or report.world_sizes
    backends = [finding.case.world.backend for finding in result.findings] or [report.backend]
    words = ["fsdp-verify", "run", result.implementation, "--check", result.check]
    words += ["--world-size", ",".join(map(str, sizes))] if sizes else []
    words += ["--tensor-parallel", str(report.tensor_parallel)] if report.tensor_parallel > 1 else []
    words += ["--backend", backends[0]] if backends[0] != "gloo" else []
    for fault in filter(None, report.environment.get("faults", "").split(", ")):
        words += ["--fault", fault]
    return shlex.join(words)


def sentence(result: CheckResult) -> str:
    """The reason of the verdict in one line; never empty. Longer text is shown below it (`accounts`)."""
    known = [result.explanation, *(finding.explanation for finding in result.findings)]
    known += [case.error for case in result.cases]
    text = next((text.strip() for text in known if text.strip()), MEANINGS[result.verdict])
    lines = text.splitlines()
    first, last = lines[0], lines[-1].strip()
    if "Traceback" not in text:
        return first
    # In an account with a traceback the first line says where, and the last one what; one may contain the other.
    if first.startswith("Traceback") or first in last:
        return last
    return first if last in first else f"{first}: {last}"


def accounts(result: CheckResult) -> tuple[str, ...]:
    """Return the reasons for the missing verdict in full, each once: the explanation, then the errors of cases."""
    texts = [result.explanation] if "\n" in result.explanation.strip() else []
    texts += [case.error for case in result.cases if case.error]
    return tuple(text for text in dict.fromkeys(texts) if text.strip() != sentence(result))


def nearest(report: RunReport, count: int = 10) -> tuple[tuple[CheckResult, float], ...]:
    """Passed results that came closest to their bound, with the largest error as a part of the bound."""
    ranked = [
        (result, max((case.worst_ratio for case in result.cases), default=0.0))
        for result in report.results
        if result.verdict is Verdict.PASS
    ]
    return tuple(sorted((item for item in ranked if item[1] > 0), key=lambda item: -item[1])[:count])
