"""What does a report answer first: can it be trusted, what is broken, what is to be done? Pure.

And the smallest picture of a cause: its operations by ranks, with the place where what is wrong shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records import FailureKind, Finding, RunReport, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.causes import Cause


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and the command that does it, if there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation of a schedule.

    Attributes:
        line: The operation.
        ranks: Each rank, and whether it is wrong here; None where nothing says so. Empty before and after that moment.
        said: What is wrong here; empty elsewhere.
    """

    line: str
    ranks: tuple[tuple[int, bool | None], ...] = ()
    said: str = ""


def state(report: RunReport) -> str:
    """Return the class of the banner: `bad`, `unknown`, `known` or `good`. Green is for a run in which all claims hold."""
    code = summary.report_exit_code(report)
    if code:
        return "bad" if code == 1 else "unknown"
    return "known" if report.count(Verdict.EXPECTED_FAILURE) + report.count(Verdict.STALE) else "good"


def trust(report: RunReport) -> tuple[str, ...]:
    """Return how much was compared with what, how close the closest came, and what was not looked at."""
    cases = [case for result in report.results for case in result.cases]
    sizes = " and ".join(map(str, report.world_sizes)) or "no"
    compared = sum(case.comparisons for case in cases)
    said = [f"{compared:,} tensors compared with those of one process, in {len(cases):,} cases on {sizes} ranks."]
    closest = summary.nearest(report, 1)
    if closest:
        result, ratio = closest[0]
        said.append(
            f"Of what passed, {result.check} on {result.implementation} came closest: {ratio:.2g} of its bound."
        )
    idle, unknown = report.count(Verdict.NOT_CLAIMED), report.count(Verdict.UNKNOWN)
    if unknown:
        said.append(f"Of {summary.checks(unknown)} nothing is known; that is never counted as a pass.")
    if idle:
        said.append(f"{summary.checks(idle).capitalize()} did not run: they need what is not claimed.")
    return tuple(said)


def advice(report: RunReport) -> tuple[Advice, ...]:
    """Return what to do about what was found, the most urgent first."""
    found = {verdict: summary.attention(report, verdict) for verdict in summary.ATTENTION}
    steps = []
    if found[Verdict.FAIL]:
        again = summary.replay_line(found[Verdict.FAIL][0], report)
        steps.append(Advice("Run the first new failure again, alone:", again))
        steps.append(
            Advice("If it is known, put its entry, which is with its account, into the file of --expected-failures.")
        )
    if found[Verdict.UNKNOWN]:
        steps.append(Advice("Ask what is wrong with this machine:", "fsdp-verify doctor"))
        again = summary.replay_line(found[Verdict.UNKNOWN][0], report)
        steps.append(Advice("Run what is unknown again, alone:", again))
    if found[Verdict.STALE]:
        names = ", ".join(f"{result.implementation} {result.check}" for result in found[Verdict.STALE])
        steps.append(Advice(f"Take off the list of expected failures, for they hold: {names}."))
    if found[Verdict.EXPECTED_FAILURE]:
        steps.append(Advice("Of the known failures read the pages: they say what to avoid, and the way around."))
    if not steps and state(report) == "good":
        steps.append(Advice("Nothing. --world-size 2,3 looks at more, --extended at more still."))
    return tuple(steps or [Advice("Ask for checks that the implementation claims:", "fsdp-verify list")])


def moments(cause: Cause) -> tuple[Moment, ...]:
    """Return the shortest schedule with the moment at which it goes wrong; without one, the operation of the finding."""
    finding = next((finding for finding in cause.findings if finding.shortest is not None), cause.findings[0])
    if cause.explanation is None:
        return (_wrong(summary.operation_place(finding), finding),)
    lines = cause.explanation.schedule
    at = _where(lines, finding)
    return tuple(_wrong(line, finding) if index == at else Moment(line) for index, line in enumerate(lines))


def _wrong(line: str, finding: Finding) -> Moment:
    everyone = range(finding.case.world.size)
    wrong = finding.wrong_on or finding.ranks or tuple(everyone)
    # A rank is right where its numbers were compared and agree; one that waits for another, or that another contradicts, may be.
    others = False if finding.wrong_on and finding.kind == FailureKind.DIVERGED else None
    ranks = tuple((rank, True if rank in wrong else others) for rank in everyone)
    return Moment(line, ranks, finding.statement or finding.explanation)


def _where(lines: tuple[str, ...], finding: Finding) -> int | None:
    """Index of the operation at which a schedule shows the failure: the last one like that of the finding.

    Schedules are reduced after the finding was made, so that the number of the operation may have changed.
    """
    wanted = _without_number(finding.operation_text.removeprefix("operation "))
    like = [index for index, line in enumerate(lines) if _without_number(line) == wanted]
    return like[-1] if like else None


def _without_number(line: str) -> str:
    number, _, rest = line.partition(" ")
    return rest if number.isdigit() else line
