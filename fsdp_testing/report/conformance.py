"""The sheets of a run: a short one for a terminal, and a complete one for a page or on request.

The complete sheet first answers whether you can trust the run, what is broken, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from fsdp_testing.cases.records import CheckResult, RunReport, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.failures import Failures, drawings, entry
from fsdp_testing.report.sheet import (
    Article,
    Block,
    Card,
    Cell,
    Facts,
    Fold,
    Group,
    Line,
    Link,
    Row,
    RowGroup,
    Section,
    Sheet,
    Table,
    bulleted,
    listed,
    numbered,
)

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

BRIEF = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "FAIL",
    Verdict.UNKNOWN: "???",
    Verdict.NOT_CLAIMED: "-",
    Verdict.EXPECTED_FAILURE: "exp.",
    Verdict.STALE: "stale",
}
"""Where columns are narrow."""
TITLES = {
    Verdict.FAIL: "new failures",
    Verdict.UNKNOWN: "unknown, so neither pass nor fail",
    Verdict.STALE: "stale: expected to fail, but do not",
    Verdict.EXPECTED_FAILURE: "known failures, as expected",
}
HINT = "--full shows every check and complete accounts, --html DIR draws them"
# Short sheet: how many causes are shown at length, and how many checks still get a table of their own.
CAUSES_AT_LENGTH = 3
ROWS_AT_SIGHT = 10
# Complete sheet: how many items the first answers name, and how many of the longest checks are listed.
CAUSES_AT_SIGHT = 4
SLOWEST = 10


def short_sheet(report: RunReport, *changes: Section) -> Sheet:
    """Return `changes`, new failures by cause, checks without a verdict, stale expectations, and known failures by page."""
    report = replace(report, own_names={})
    failures = Failures(report)
    stale = [
        Line(f"  {result.implementation} {result.check}: {result.expected}")
        for result in summary.attention(report, Verdict.STALE)
    ]
    causes = f"{numbered(len(failures.new), 'cause')} ({_costs(failures)})" if failures.new else ""
    parts: dict[Verdict, tuple[Iterable[Block], str]] = {
        Verdict.FAIL: (_failed(failures, summary.attention(report, Verdict.FAIL)), causes),
        Verdict.UNKNOWN: (_unknown(failures, summary.attention(report, Verdict.UNKNOWN)), ""),
        Verdict.STALE: (stale, ""),
        Verdict.EXPECTED_FAILURE: (_known_lines(failures), numbered(len(failures.known), "reason")),
    }
    sections = [*changes]
    for verdict, (blocks, more) in parts.items():
        if count := report.count(verdict):
            title = listed(filter(None, (f"{TITLES[verdict]}: {numbered(count, 'check')}", more)))
            sections.append(Section(title, tuple(blocks), kind=verdict.value))
    table = verdict_table(report, failures)
    few = 0 < sum(len(group.rows) for group in table.groups) <= ROWS_AT_SIGHT
    hints: list[Block] = [Line(HINT, "meaning")] if failures.new or failures.known else []
    closing = (_cards(report), *hints, Line(summary.circumstances(report), "meaning"))
    return replace(_frame(report), lead=(table,) if few else (), sections=tuple(sections), closing=closing)


def _costs(failures: Failures) -> str:
    return summary.severities(cause.findings for _, cause in failures.new)


def _failed(failures: Failures, results: tuple[CheckResult, ...]) -> Iterator[Block]:
    """Every cause of an unexpected failure, the first few at length, and failures without a finding."""
    for number, (_, cause) in enumerate(failures.new):
        brief = Article(cause.sentence, (failures.broken(cause.results),), cause.implementation)
        yield failures.cause(cause) if number < CAUSES_AT_LENGTH else brief
    for result in results:
        if not result.findings:
            yield failures.result(result)
        elif result.remark:
            yield Line(f"{result.implementation} {result.check}: {result.remark}")
        elif len(results) <= CAUSES_AT_LENGTH:
            yield entry(result, unfolded=True)


def _unknown(failures: Failures, results: tuple[CheckResult, ...]) -> Iterator[Block]:
    """Show results with the same text once."""
    for _, (first, *others) in _grouped(results, lambda result: (result.implementation, summary.sentence(result))):
        article = failures.result(first, findings=1)
        same = [Line(f"the same: {listed(result.check for result in others)}")] if others else []
        yield replace(article, blocks=(*article.blocks, *same))


def _known_lines(failures: Failures) -> list[Line]:
    """Return a line for each known failure, and a line for each way in which it fails if there are several."""
    lines = []
    for _, group in failures.known:
        lines.append(Line(f"  {len(group.results):>3}  {group.sentence}"))
        looks = group.looks if len(group.looks) > 1 else ()
        lines += [Line(f"       {numbered(count, 'case')}: {look}") for look, count in looks]
    return lines


def complete_sheet(report: RunReport, *changes: Section) -> Sheet:
    """Return everything that is known about a run, after the `changes` since an earlier one."""
    failures = Failures(report)
    words = tuple((summary.WORDS[verdict], summary.MEANINGS[verdict]) for verdict in Verdict)
    legend = Facts(words, tuple(verdict.value for verdict in Verdict))
    sections = (
        *changes,
        *_told(failures),
        Section("Suites", (verdict_table(report, failures), legend), anchor="verdicts"),
        *(_trouble(failures, verdict, summary.attention(report, verdict)) for verdict in summary.ATTENTION),
        _rest(
            _portraits(report, failures),
            _not_claimed(report, failures),
            _margins(report, failures),
            Section("Environment", (Facts(tuple(summary.facts(report).items())),), anchor="environment"),
        ),
    )
    answers = (
        Section("How far to trust it", tuple(map(Line, summary.trust(report)))),
        Section("What is broken", (Group(tuple(_broken(report, failures)), "list"),)),
        Section("What to do", tuple(_advice(report))),
    )
    lead = (Group(answers, "answers"), _cards(report))
    return replace(_frame(report), lead=lead, sections=tuple(section for section in sections if section.blocks))


def _rest(*sections: Section) -> Section:
    """Return the details that few readers need, folded."""
    blocks = tuple(section for section in sections if section.blocks)
    titles = ", ".join(section.title[0].lower() + section.title[1:] for section in blocks)
    return Section("Everything else", (Fold(titles.capitalize(), blocks),))


def _frame(report: RunReport) -> Sheet:
    subject = listed(report.own_names.get(name, name) for name in summary.implementations(report))
    return Sheet(
        title=f"{subject}: conformance report",
        exit_code=summary.report_exit_code(report),
        conclusion=summary.conclusion(report),
        subject=subject or "No implementation",
        genre="Conformance report",
        headline=summary.headline(report),
        environment=report.environment,
        foot="Made by fsdp-testing. Every bound is derived and printed beside the error that it is compared with.",
        known=bool(report.count(Verdict.EXPECTED_FAILURE) + report.count(Verdict.STALE)),
    )


def _cards(report: RunReport) -> Group:
    cards = []
    for tally in summary.tallies(report):
        kind = next((verdict for verdict in summary.ATTENTION if tally.counts[verdict]), Verdict.PASS)
        shares = tuple((verdict.value, tally.counts[verdict]) for verdict in Verdict if tally.counts[verdict])
        name, own = tally.implementation, report.own_names.get(tally.implementation, tally.implementation)
        note = f"{numbered(tally.cases, 'case')}, {tally.seconds:.1f} s"
        cards.append(Card(own, tally.sentence, note, kind.value, shares, name if own != name else ""))
    return Group(tuple(cards), "tallies")


def _broken(report: RunReport, failures: Failures) -> Iterator[Line]:
    """What is new, unknown or stale; if nothing is new, also the reasons of the known failures."""
    if failures.new:
        yield Line(f"New: {_costs(failures)}.", "said")
    for anchor, cause in failures.new[:CAUSES_AT_SIGHT]:
        yield Line(f"{failures.own(cause.implementation)}:", links=(Link(cause.sentence, anchor),))
    links = []
    if len(failures.new) > CAUSES_AT_SIGHT:
        links.append(Link(f"{len(failures.new) - CAUSES_AT_SIGHT} more new causes", "causes"))
    for verdict in (Verdict.UNKNOWN, Verdict.STALE):
        if count := report.count(verdict):
            links.append(Link(f"{numbered(count, 'check')} {summary.WORDS[verdict]}", verdict.value))
    if failures.known:
        count, reasons = report.count(Verdict.EXPECTED_FAILURE), numbered(len(failures.known), "reason")
        links.append(Link(f"Known and expected: {numbered(count, 'check')} for {reasons}", "known"))
    if not failures.new:
        links += [Link(group.reason, anchor) for anchor, group in failures.known[:CAUSES_AT_SIGHT]]
    yield from (Line("", links=(link,)) for link in links)
    if not failures.new and not links and not report.count(Verdict.FAIL):
        yield Line("Nothing, in these checks.")


def _advice(report: RunReport) -> Iterator[Line]:
    """What to do, the most urgent first."""
    failed, unknown, stale, known = (summary.attention(report, verdict) for verdict in summary.ATTENTION)
    if failed:
        yield Line("Run the first new failure again, alone:", command=summary.replay_line(failed[0], report))
        where = "copy the entry in its account into the file of --expected-failures."
        yield Line(f"If it is known, {where}")
    if unknown:
        yield Line("Examine this machine:", command="fsdp-verify doctor")
        yield Line("Run the unknown checks again, alone:", command=summary.replay_line(unknown[0], report))
    if stale:
        names = listed(f"{result.implementation} {result.check}" for result in stale)
        yield Line(f"Take these off the list of expected failures, because they hold: {names}.")
    if known:
        yield Line("Known failures: each linked page says what to avoid and how to work around it.")
    if not (failed or unknown or stale or known):
        if summary.report_exit_code(report):
            yield Line("Ask for checks that the implementation claims:", command="fsdp-verify list")
        else:
            yield Line("Nothing. For a wider check add --world-size 2,3,4 --extended.")


def _told(failures: Failures) -> Iterator[Section]:
    new = tuple(
        failures.cause(cause, anchor, unfolded=number == 0) for number, (anchor, cause) in enumerate(failures.new)
    )
    note = "each once, with the operations that show it"
    yield Section("New causes", new, note, "causes", f"New causes ({len(new)})", "fail")
    known = tuple(failures.known_failure(group, anchor) for anchor, group in failures.known)
    note = "each failed as the list of expected failures says; one entry for each page"
    kind = Verdict.EXPECTED_FAILURE.value
    yield Section("Known failures", known, note, "known", f"Known ({len(known)})", kind)


def verdict_table(report: RunReport, failures: Failures) -> Table:
    """Return checks by implementations, suites in order of first appearance."""
    names = summary.implementations(report)
    groups = []
    for suite, checks in _grouped(summary.by_check(report).items(), lambda item: summary.suite_of(item[0])):
        rows = []
        for check, results in checks:
            label = check.removeprefix(f"{suite}.")
            meaning = next(iter(results.values())).meaning
            if len(report.world_sizes) > 1:
                sizes = sorted({size for result in results.values() for size in result.world_sizes})
                meaning += f" ({listed(map(str, sizes))} ranks)" if sizes else ""
            rows.append(Row(label, tuple(_cell(results.get(name), failures) for name in names), meaning))
        words, urgent = summary.suite_state([result for _, results in checks for result in results.values()])
        groups.append(RowGroup(tuple(rows), suite, f"{numbered(len(rows), 'check')}: {words}", urgent))
    if len(groups) == 1:
        groups = [replace(groups[0], urgent=True)]
    key = f"{BRIEF[Verdict.NOT_CLAIMED]} not claimed, . not run, {BRIEF[Verdict.UNKNOWN]} unknown"
    return Table("check", tuple(map(failures.own, names)), tuple(groups), brief_key=key)


def _cell(result: CheckResult | None, failures: Failures) -> Cell:
    if result is None:
        return Cell("not run", "not_claimed", ".")
    verdict = result.verdict
    anchor = failures.anchor(result) if verdict in summary.ATTENTION else ""
    return Cell(summary.WORDS[verdict], verdict.value, BRIEF[verdict], anchor, summary.sentence(result))


def _trouble(failures: Failures, verdict: Verdict, results: tuple[CheckResult, ...]) -> Section:
    word, kind = summary.WORDS[verdict], verdict.value
    blocks: tuple[Block, ...] = tuple(map(failures.result, results))
    if blocks and verdict is Verdict.EXPECTED_FAILURE:
        title = f"{numbered(len(results), 'check')}, one by one; their reasons are under Known failures"
        blocks = (Fold(title, blocks, kind="one-by-one"),)
    title = word[:1].upper() + word[1:]
    return Section(title, blocks, summary.MEANINGS[verdict], kind, f"{title} ({len(results)})", kind)


def _portraits(report: RunReport, failures: Failures) -> Section:
    sections = []
    for name, portraits in _grouped(report.portraits, lambda portrait: portrait.implementation):
        folds = []
        for portrait in portraits:
            blocks = (Line(portrait.remark, "said"),) if portrait.remark else drawings(portrait)
            folds.append(Fold(summary.world_text(portrait.case), blocks, page_only=True, kind="portrait"))
        sections.append(Section(failures.own(name), tuple(folds)))
    note = "one short program under each strategy, traced; it decides no verdict"
    return Section("How they ran", tuple(sections), note, "portraits")


def _not_claimed(report: RunReport, failures: Failures) -> Section:
    folds = []
    results = summary.attention(report, Verdict.NOT_CLAIMED)
    for name, own in _grouped(results, lambda result: result.implementation):
        reasons = bulleted(f"{result.check}: {summary.sentence(result)}" for result in own)
        folds.append(Fold(f"{failures.own(name)}: {numbered(len(own), 'check')} not run", (reasons,)))
    return Section("Not claimed", tuple(folds), anchor="not-claimed")


def _margins(report: RunReport, failures: Failures) -> Section:
    def table(title: str, unit: str, results: Iterable[tuple[CheckResult, str]]) -> Table:
        rows = [Row(result.check, (Cell(failures.own(result.implementation)), Cell(n))) for result, n in results]
        return Table("check", ("implementation", unit), (RowGroup(tuple(rows)),), title, numbers=True)

    slowest = sorted(report.results, key=lambda result: -result.seconds)[:SLOWEST]
    nearest = [(result, f"{ratio:.3g}") for result, ratio in summary.nearest(report)]
    tables = [table("Longest", "seconds", ((result, f"{result.seconds:.2f}") for result in slowest))]
    if nearest:
        tables.insert(0, table("Passed, but nearest to the bound", "error / bound", nearest))
    return Section("Margins and durations", (Group(tuple(tables), "pair"),), anchor="margins")


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> list[tuple[Key, list[Item]]]:
    """Items grouped by what they share, in the order of the run."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())
