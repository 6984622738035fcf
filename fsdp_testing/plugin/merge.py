"""Merges the reports and fates of N ranks into the one result of their test. Pure.

A test passes when every rank passed every phase, and is skipped or an expected failure when every rank says so. It
fails if any rank failed, died, hung or disagrees; the text says which rank did what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_testing.plugin.longrepr import (
    Element,
    abbreviated,
    build,
    crash_of,
    elements_of,
    fold,
    is_consequence,
    is_mismatch,
    message_of,
    text_element,
    with_header,
)
from fsdp_testing.plugin.records import STRICT_XPASS, Phase, RankResult
from fsdp_testing.ranks.pool.outcome import Fate, RankOutcome, WorldOutcome, account_lines, rank_names

_PHASES = ("setup", "call", "teardown")
_WITHOUT_FAILURE = frozenset({"skipped", "xfailed", "xpassed", "skipped in teardown", "xfailed in teardown"})


@dataclass(frozen=True, slots=True)
class Account:
    """One rank's part: its fate, and its pytest's reports, if any."""

    rank: int
    outcome: RankOutcome
    result: RankResult | None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Its reports, in order."""
        return self.result.phases if self.result is not None else ()

    @property
    def verdict(self) -> str:
        """One of passed, failed, skipped, xfailed, xpassed, incomplete; or the fate of a rank without a report.

        A rank that ran the test and skipped only the rest of its teardown did not skip the test.
        """
        if self.result is None:
            return str(self.outcome.fate)
        return "failed" if self.result.failed else self.without_teardown

    @property
    def without_teardown(self) -> str:
        """The verdict of a rank that reported, and failed in its teardown at most."""
        own = [phase for phase in self.phases if phase.subtest is None]
        for phase in own:
            if phase.outcome == "skipped":
                word = "skipped" if phase.wasxfail is None else "xfailed"
                return word if phase.when != "teardown" else f"{word} in teardown"
        if {phase.when for phase in own} != set(_PHASES):
            return "incomplete"
        return "xpassed" if any(phase.wasxfail is not None for phase in own) else "passed"

    def failing(self) -> tuple[Phase, ...]:
        """Return the reports that are failures."""
        return tuple(phase for phase in self.phases if phase.outcome == "failed")

    def idle_subtests(self) -> tuple[Phase, ...]:
        """Return the reports of subtests that were skipped or failed as expected."""
        return tuple(phase for phase in self.phases if phase.subtest is not None and phase.outcome == "skipped")

    def clause(self) -> str:
        """Say how this rank ended, in one clause of a disagreement."""
        if self.result is None:
            return self.outcome.headline()
        verdict, reason = self.verdict, self.reason()
        if verdict == "incomplete":
            reported = ", ".join(phase.when for phase in self.phases) or "nothing"
            return f"rank {self.rank} reported {reported} and no more"
        if verdict == "failed":
            return f"rank {self.rank} failed: {self.first_message()}"
        idle = "".join(f", its subtest {_described(phase)}" for phase in self.idle_subtests())
        return f"rank {self.rank} {verdict}" + (f" ({reason})" if reason is not None else "") + idle

    def reason(self) -> str | None:
        """Return why the test was skipped or expected to fail; None for another verdict."""
        verdict = self.verdict
        for phase in self.phases:
            if phase.subtest is not None:
                continue
            if verdict.startswith("skipped") and phase.outcome == "skipped":
                return message_of(phase.longrepr).removeprefix("Skipped: ")  # pytest's own prefix
            if verdict.startswith(("xfailed", "xpassed")) and phase.wasxfail is not None:
                return phase.wasxfail or "no reason given"
        return None

    def first_message(self) -> str:
        """Return what went wrong first on this rank."""
        if self.result is not None and self.result.problem:
            return self.result.problem.strip().splitlines()[-1]
        failing = self.failing()
        return message_of(failing[0].longrepr) if failing else ""


def accounts_of(outcome: WorldOutcome) -> tuple[Account, ...]:
    """Pair every rank's fate with its result."""
    return tuple(
        Account(rank.rank, rank, rank.value if isinstance(rank.value, RankResult) else None) for rank in outcome.ranks
    )


def merge(outcome: WorldOutcome, location: tuple[str, int]) -> list[Phase]:
    """Return the merged reports, in order.

    Args:
        outcome: What every rank did with the item.
        location: Path and line of the test, for failures without a place of their own.

    Returns:
        Setup, call unless setup ended it, teardown.
    """
    accounts = accounts_of(outcome)
    verdicts = {account.verdict for account in accounts}
    ok = outcome.ok and _same_subtests(accounts)
    if verdicts == {"passed"} and ok and _same_groups(accounts):
        return _plain(accounts)
    if len(verdicts) == 1 and verdicts <= _WITHOUT_FAILURE and ok:
        return _alike(accounts)
    if "xfailed" in verdicts and _is_expected(outcome, accounts, verdicts, ok=ok):
        return _partly_expected(accounts)
    return _failure(outcome, accounts, location)


def _is_expected(outcome: WorldOutcome, accounts: Sequence[Account], verdicts: set[str], *, ok: bool) -> bool:
    """Whether a test that is marked to fail did so on some ranks, and the others passed, or waited for those until the end."""
    waited = [account for account in accounts if account.verdict == Fate.STOPPED]
    if not waited:
        return ok and "xpassed" in verdicts and len(verdicts) == 2
    joined = all(account.outcome.collectives for account in waited)
    return joined and outcome.diagnosis is not None and verdicts <= {"xfailed", "xpassed", Fate.STOPPED}


def _same_groups(accounts: Sequence[Account]) -> bool:
    return len({account.result.groups for account in accounts if account.result is not None}) == 1


def _same_subtests(accounts: Sequence[Account]) -> bool:
    """Whether every rank skipped the same subtests; only the rank may differ among their arguments.

    In a test marked to fail, a subtest may fail on some ranks only, as the test may.
    """
    seen = set()
    for account in accounts:
        marked = account.verdict in ("xfailed", "xpassed")
        idle = [phase for phase in account.idle_subtests() if not (marked and phase.wasxfail is not None)]
        seen.add(tuple(sorted(map(_described, idle))))
    return len(seen) == 1


def _described(phase: Phase) -> str:
    context = phase.subtest or {}
    arguments = [f"{name}={value}" for name, value in (context.get("kwargs") or {}).items() if name != "rank"]
    name = ", ".join(filter(None, [str(context.get("msg") or ""), *arguments])) or "without a name"
    return f"{name} {'skipped' if phase.wasxfail is None else 'xfailed'}"


def _durations(accounts: Sequence[Account]) -> dict[str, float]:
    """Return the seconds of each phase on its slowest rank."""
    longest = dict.fromkeys(_PHASES, 0.0)
    for account in accounts:
        for phase in account.phases:
            longest[phase.when] = max(longest[phase.when], phase.duration)
    return longest


def _whens(accounts: Sequence[Account]) -> list[str]:
    seen = {phase.when for account in accounts for phase in account.phases}
    return [when for when in _PHASES if when in seen or when != "call"]


def _plain(accounts: Sequence[Account]) -> list[Phase]:
    durations = _durations(accounts)
    merged = [Phase(when, "passed", durations[when]) for when in _whens(accounts)]
    most = max((account.idle_subtests() for account in accounts), key=len)  # under a mark some ranks may have none
    merged[1:1] = [replace(phase, sections=[]) for phase in most]
    return _with_sections(merged, accounts)


def _alike(accounts: Sequence[Account]) -> list[Phase]:
    """Every rank skipped, or every rank xfailed or xpassed: the first rank's reports, with every reason."""
    merged = _plain(accounts)
    by_when = {report.when: report for report in merged if report.subtest is None}
    for phase in accounts[0].phases:
        if phase.subtest is None and (phase.outcome != "passed" or phase.wasxfail is not None):
            report = by_when[phase.when]
            report.outcome, report.longrepr, report.wasxfail = phase.outcome, phase.longrepr, phase.wasxfail
            if isinstance(phase.longrepr, str) and phase.longrepr.startswith(STRICT_XPASS):
                report.outcome, report.wasxfail = "failed", None
    if by_when["setup"].outcome == "skipped":  # other ranks did so in the call, so the call has not passed
        merged = [report for report in merged if report.when != "call"]
    reasons = {account.reason() for account in accounts}
    skipped = [report for report in by_when.values() if report.outcome == "skipped"]
    skipped = [report for report in skipped if isinstance(report.longrepr, list | tuple)]
    for report in skipped[:1]:
        path, line, reason = report.longrepr
        every = "Skipped: " + "; ".join(account.clause() for account in accounts)
        report.longrepr = path, line, reason if len(reasons) == 1 else every
    return merged


def _partly_expected(accounts: Sequence[Account]) -> list[Phase]:
    failed = [account for account in accounts if account.verdict == "xfailed"]
    passed = [account.rank for account in accounts if account.verdict == "xpassed"]
    waited = [account.rank for account in accounts if account.result is None]
    others = [f"{how} {rank_names(ranks)}" for how, ranks in (("passed on", passed), ("awaited by", waited)) if ranks]
    merged = _alike(failed)
    for report in merged:
        if report.wasxfail is not None and report.subtest is None and others:
            where = ", ".join([f"failed on {rank_names(account.rank for account in failed)}", *others])
            report.wasxfail = f"{report.wasxfail} ({where})" if report.wasxfail else where
    return merged


def _failure(outcome: WorldOutcome, accounts: Sequence[Account], location: tuple[str, int]) -> list[Phase]:
    """A failed setup or call that names every rank, and failed teardowns separately, as in pytest."""
    durations = _durations(accounts)
    teardown = [account for account in accounts if any(p.when == "teardown" for p in account.failing())]
    others = [
        a for a in accounts if a.result is None or a.result.problem or any(p.when != "teardown" for p in a.failing())
    ]
    reports: list[Phase] = []
    only_teardown = outcome.diagnosis is None or all(a.outcome.fate is Fate.RETURNED for a in accounts)
    # A rank that failed in its teardown alone is told there, not as one that disagrees.
    reported = {
        account.verdict if account in others else account.without_teardown
        for account in accounts
        if account.result is not None
    }
    quiet = reported - {"failed"}
    # Reporting ranks ended differently, though not by plain failures.
    disagree = len(quiet) > 1 or bool(quiet - {"passed"} and "failed" in reported)
    if others or not teardown or not only_teardown or disagree:
        early = [p for a in accounts for p in a.failing() if p.when == "setup"]
        when = "setup" if early or any(a.result and a.result.problem for a in accounts) else "call"
        if when == "call":
            reports.append(Phase("setup", "passed", durations["setup"]))
        reports.append(Phase(when, "failed", durations[when], _account_of_all(outcome, accounts, location)))
    else:
        merged = _alike(accounts) if len(reported) == 1 else _plain(accounts)
        reports.extend(replace(report, sections=[]) for report in merged if report.when != "teardown")
    last = Phase("teardown", "passed", durations["teardown"])
    if teardown:
        last.fail(_teardown_text(teardown, accounts, location))
    return _with_sections([*reports, last], accounts)


def _account_of_all(outcome: WorldOutcome, accounts: Sequence[Account], location: tuple[str, int]) -> dict[str, object]:
    lead = lead_of(outcome, accounts)
    elements: list[Element] = [text_element([lead])]
    quiet = [a for a in accounts if a.result is not None and not a.result.failed]
    if quiet and len(quiet) < len(accounts):
        passed = [account.rank for account in quiet if account.verdict == "passed"]
        others = [account.clause() for account in quiet if account.verdict != "passed"]
        elements[0] = text_element([lead, *others, *([f"{rank_names(passed)} passed"] if passed else [])])
    bereft = any(account.result is None for account in accounts)
    for account in accounts:
        if account.result is None:
            elements.extend(
                with_header(f" {account.outcome.headline()} ", [text_element(_fate_lines(account.outcome))])
            )
    problems = [(a.rank, a.result.problem) for a in accounts if a.result is not None and a.result.problem]
    for ranks, problem in fold(problems):
        elements.extend(with_header(f" {rank_names(ranks)} could not run the test ", elements_of(problem)))
    crash = mismatch = None
    for when in ("setup", "call"):
        failing = [(a.rank, p.longrepr) for a in accounts for p in a.failing() if p.when == when]
        for ranks, longrepr in fold(failing):
            crash = crash or crash_of(longrepr)
            again = mismatch is not None and is_mismatch(longrepr)  # the same collective, seen by another rank
            mismatch = longrepr if is_mismatch(longrepr) else mismatch
            short = again or (bereft and is_consequence(longrepr))
            shown = abbreviated(longrepr) if short else elements_of(longrepr)
            elements.extend(with_header(f" {rank_names(ranks)}: {when} failed ", shown))
    return build(elements, lead, crash, location)


def _teardown_text(
    failed: Sequence[Account], accounts: Sequence[Account], location: tuple[str, int]
) -> dict[str, object]:
    failing = [(a.rank, p.longrepr) for a in failed for p in a.failing() if p.when == "teardown"]
    folded = fold(failing)
    lead = f"{rank_names(a.rank for a in failed)}: {message_of(failing[0][1])}"
    elements: list[Element] = [text_element([f"teardown failed on {len(failed)} of {len(accounts)} ranks"])]
    for ranks, longrepr in folded:
        elements.extend(with_header(f" {rank_names(ranks)}: teardown failed ", elements_of(longrepr)))
    return build(elements, lead, crash_of(failing[0][1]), location)


def lead_of(outcome: WorldOutcome, accounts: Sequence[Account]) -> str:
    """Return the one fact that explains the rest."""
    failed = [account for account in accounts if account.result is not None and account.result.failed]
    if outcome.cause and any(account.outcome.fate in (Fate.DIED, Fate.RAISED) for account in accounts):
        return outcome.cause
    if failed:
        return _failed_lead(outcome, accounts, failed)
    skipped = [account for account in accounts if account.verdict in ("skipped", "xfailed")]
    if outcome.cause and skipped:
        return f"{'; '.join(account.clause() for account in skipped)}; {outcome.cause}"
    if outcome.cause:
        return outcome.cause
    if not _same_groups(accounts):
        made = ", ".join(f"rank {a.rank}: {a.result.groups}" for a in accounts if a.result is not None)
        return f"ranks disagree: they made different numbers of process groups ({made})"
    return "ranks disagree: " + "; ".join(account.clause() for account in accounts)


def _failed_lead(outcome: WorldOutcome, accounts: Sequence[Account], failed: Sequence[Account]) -> str:
    messages: dict[str, list[int]] = {}
    # The rank that failed first leads: the others may fail because of it.
    for account in sorted(failed, key=lambda account: account.outcome.finished_at):
        messages.setdefault(account.first_message(), []).append(account.rank)
    lead = "; ".join(f"{rank_names(ranks)}: {message}" for message, ranks in messages.items())
    waiting = [account for account in accounts if account.result is None]
    if waiting:
        # What ranks without a report waited for, or how each of them ended.
        diagnosis = outcome.diagnosis
        clause = diagnosis.clause_of([account.rank for account in waiting]) if diagnosis is not None else ""
        lead += "; " + (clause or "; ".join(account.outcome.headline() for account in waiting))
    others = [a for a in accounts if a.result is not None and not a.result.failed and a.verdict != "passed"]
    return "; ".join([lead, *(account.clause() for account in others)])


def _fate_lines(rank: RankOutcome) -> list[str]:
    # Python's own account of a fatal signal, written to descriptor 2 as the process went down.
    fatal = rank.stderr.find("Fatal Python error") if rank.fate is Fate.DIED else -1
    shown = rank if fatal < 0 else replace(rank, stack=rank.stderr[fatal:])
    return account_lines(shown) or ["it left no traceback and issued no collective"]


def _with_sections(merged: list[Phase], accounts: Sequence[Account]) -> list[Phase]:
    """Attach what ranks wrote and logged, named by rank, to the report that readers see."""
    shown = next((r for r in merged if r.outcome == "failed"), None)
    shown = shown or next((r for r in merged if r.when == "call" and r.subtest is None), merged[0])
    texts: list[tuple[str, str, int]] = []
    for account in accounts:
        for phase in account.phases:
            texts.extend((title, text, account.rank) for title, text in phase.sections if text)
    for stream in ("stdout", "stderr"):
        texts.extend(
            (f"Captured {stream}", getattr(a.outcome, stream), a.rank) for a in accounts if getattr(a.outcome, stream)
        )
    grouped: dict[tuple[str, str], list[int]] = {}
    for title, text, rank in texts:
        ranks = grouped.setdefault((title, text), [])
        if rank not in ranks:
            ranks.append(rank)
    shown.sections.extend((f"{title} ({rank_names(ranks)})", text) for (title, text), ranks in grouped.items())
    return merged
