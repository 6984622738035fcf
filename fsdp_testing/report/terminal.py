"""How does a report look in a terminal? What is new by its cause, what was known in a line, then the tallies.

Complete accounts and every check are for those who ask (`full`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fsdp_testing.base import env
from fsdp_testing.base.printable import printable
from fsdp_testing.cases.records import CheckResult, Finding, RunReport, Verdict
from fsdp_testing.judging.entry import entry_line
from fsdp_testing.report import summary
from fsdp_testing.report.causes import Cause, causes, explanation_line

# Colour repeats what the word says; colour alone says nothing.
STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.UNKNOWN: "bold magenta",
    Verdict.NOT_CLAIMED: "dim",
    Verdict.EXPECTED_FAILURE: "yellow",
    Verdict.STALE: "bold yellow",
}
# Where columns are narrow; None stands for a check that was not run.
SHORT = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "FAIL",
    Verdict.UNKNOWN: "???",
    Verdict.NOT_CLAIMED: "-",
    Verdict.EXPECTED_FAILURE: "exp.",
    Verdict.STALE: "stale",
    None: ".",
}
TITLES = {
    Verdict.FAIL: "new failures",
    Verdict.UNKNOWN: "unknown, so neither pass nor fail",
    Verdict.STALE: "stale: expected to fail, and do not",
    Verdict.EXPECTED_FAILURE: "known failures, as expected",
}
LONGEST_WORD = max(map(len, summary.WORDS.values()))
HEAD_LINES = 4
TAIL_LINES = 12
ACCOUNTS_AT_LENGTH = 4
LOG_WIDTH = 120
# A report that is not full: how many causes are shown at length, and how many checks still make a table of their own.
CAUSES_AT_LENGTH = 3
ROWS_AT_SIGHT = 10


class Output(Console):
    """A console that shows names and messages as they are, but no control character of theirs."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Draw; whatever a text holds, only what rich itself draws moves the cursor or sets a style."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def say(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line of parts, each a text or a text with its style: no markup, and not broken where the width ends."""
        self.print(Text.assemble(*parts, style=style), soft_wrap=True)


def open_console() -> Output:
    """Return a console on standard output; a log file, which has no width, gets a usual one unless `COLUMNS` sets it."""
    console = Output(highlight=False)
    if not console.is_terminal and not env.get("COLUMNS"):
        return Output(highlight=False, width=LOG_WIDTH)
    return console


def print_report(report: RunReport, console: Console, *, full: bool = False) -> None:
    """Print the report: about twenty lines where nothing is new, all of it where `full`.

    Args:
        report: What was found.
        console: Where to; its width decides the layout.
        full: Show every check, complete tracebacks and all findings, of what was expected too.
    """
    if full:
        parts = (*verdict_table(report, console.width), *_troubles(report), *cause_lines(report), Text())
    else:
        parts = tuple(in_short(report, console.width))
    for part in (*parts, *closing_lines(report)):
        # Tables fit the width; text keeps its own lines, so that replay lines and paths can be copied.
        console.print(part, soft_wrap=isinstance(part, Text))


def in_short(report: RunReport, width: int) -> Iterator[RenderableType]:
    """Return what is new by its cause, what nothing is known of, what is stale, and what was expected by its page."""
    few = 0 < len(summary.matrix(report).rows) <= ROWS_AT_SIGHT
    yield from (*verdict_table(report, width), Text()) if few else ()
    yield from _new_failures(report)
    unknown: dict[tuple[str, str], list[CheckResult]] = {}
    for result in summary.attention(report, Verdict.UNKNOWN):
        unknown.setdefault((result.implementation, summary.sentence(result)), []).append(result)
    if unknown:
        yield _title(report, Verdict.UNKNOWN)
    for results in unknown.values():
        yield from result_account(results[0], report, full=False)
        if results[1:]:
            yield plain(f"  the same: {', '.join(result.check for result in results[1:])}")
        yield Text()
    stale = summary.attention(report, Verdict.STALE)
    if stale:
        yield _title(report, Verdict.STALE)
        yield from (plain(f"  {result.implementation} {result.check}: {result.expected}") for result in stale)
        yield Text()
    known = summary.known_failures(report)
    if known:
        yield _title(report, Verdict.EXPECTED_FAILURE, f", {len(known)} reason{'s' if len(known) > 1 else ''}")
        for group in known:
            yield plain(f"  {len(group.results):>3}  {group.sentence}")
            if len(group.looks) > 1:
                yield from (plain(f"       {_cases(count)}: {look}") for look, count in group.looks)
        yield Text()


def _new_failures(report: RunReport) -> Iterator[RenderableType]:
    """Every cause of an unexpected failure, the first few at length, and failures without a finding."""
    failed = summary.attention(report, Verdict.FAIL)
    if not failed:
        return
    new = [cause for cause in causes(report) if not cause.expected]
    yield _title(report, Verdict.FAIL, f", {len(new)} cause{'s' if len(new) > 1 else ''}" if new else "")
    for cause in new[:CAUSES_AT_LENGTH]:
        yield from _cause_account(cause, report)
    for cause in new[CAUSES_AT_LENGTH:]:
        yield Text.assemble((cause.implementation, "bold"), "  ", plain(cause.sentence))
        yield plain(f"  breaks: {', '.join(result.check for result in cause.results)}")
    for result in failed:
        if not result.findings:
            yield from result_account(result, report, full=False)
        elif result.remark:
            yield plain(f"  {result.implementation} {result.check}: {result.remark}")
    if len(failed) <= CAUSES_AT_LENGTH:
        yield from (_entry(result) for result in failed if result.findings and not result.remark)
    yield Text()


def _entry(result: CheckResult) -> Text:
    """What a person pastes into the list of expected failures, if the failure is known."""
    line = entry_line(result.check, result.findings)
    return plain(f"  if it is known, for --expected-failures, under [{result.implementation}]:\n{line}", style="dim")


def _cases(count: int) -> str:
    return f"{count} case{'s' if count > 1 else ''}"


def _title(report: RunReport, verdict: Verdict, more: str = "") -> Rule:
    title = Text(f"{TITLES[verdict]}: {summary.checks(report.count(verdict))}{more}", style=STYLES[verdict])
    return Rule(title, style=STYLES[verdict], align="left")


def _cause_account(cause: Cause, report: RunReport) -> Iterator[RenderableType]:
    """Return one cause: what happens, the facts of its first finding, the schedule that shows it, and what it breaks."""
    result, finding = next(
        (result, finding)
        for result in cause.results
        for finding in result.findings
        if result.verdict is Verdict.FAIL and finding.expected is None and finding in cause.findings
    )
    yield Text.assemble((cause.implementation, "bold"), "  ", plain(cause.sentence))
    if len(cause.results) == 1:
        yield plain(f"  {result.check}: {result.meaning}")
    yield Padding(_finding_table(finding, cause.sentence), (0, 0, 0, 2))
    if cause.explanation is not None:
        yield plain("\n".join(f"    {line}" for line in cause.explanation.schedule), style="cyan")
    elif finding.detail:
        yield _account(finding.detail, full=False)
    if cause.unexplained:
        yield plain(f"  cause: {cause.unexplained}; --explain SECONDS looks at more", style="dim")
    if len(cause.results) > 1:
        yield plain(f"  breaks: {', '.join(result.check for result in cause.results)}")
    yield Text.assemble("  replay: ", (summary.replay_line(result, report), "bold"))


def _troubles(report: RunReport) -> Iterator[RenderableType]:
    for verdict in summary.ATTENTION:
        results = summary.attention(report, verdict)
        if results:
            yield from (Text(), _title(report, verdict), Text(summary.MEANINGS[verdict], style="dim"))
            for result in results:
                yield Text()
                yield from result_account(result, report, full=True)


def verdict_table(report: RunReport, width: int) -> Iterator[RenderableType]:
    """Check by implementations; where the names do not fit, columns are numbered and words are short, with a key."""
    found = summary.matrix(report)
    labels = [len(row.check.removeprefix(f"{suite}.")) + 2 for suite, rows in found.suites for row in rows]
    columns = [max(len(name), LONGEST_WORD) + 1 for name in found.implementations]
    narrow = max(labels, default=5) + 1 + sum(columns) > width
    headers = [str(number) for number in range(1, len(columns) + 1)] if narrow else found.implementations
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("check", overflow="fold")
    for header in headers:
        table.add_column(Text(header), overflow="fold", no_wrap=narrow)
    for suite, rows in found.suites:
        table.add_row(Text(suite, style="bold"))
        for row in rows:
            label = Text(f"  {row.check.removeprefix(f'{suite}.')}")
            table.add_row(label, *(cell(result, short=narrow) for result in row.results))
    yield table
    if narrow:
        key = [f"{header} {name}" for header, name in zip(headers, found.implementations, strict=True)]
        yield plain(f"columns: {', '.join(key)}")
        yield Text(f"{SHORT[Verdict.NOT_CLAIMED]} not claimed, {SHORT[None]} not run, {SHORT[Verdict.UNKNOWN]} unknown")


def cell(result: CheckResult | None, *, short: bool) -> Text:
    """Return a verdict as one coloured word; `not run` where there is no result at all."""
    verdict = result.verdict if result is not None else None
    word = SHORT[verdict] if short else summary.WORDS[verdict] if verdict is not None else "not run"
    return Text(word, style=STYLES[verdict] if verdict is not None else "dim")


def result_account(result: CheckResult, report: RunReport, *, full: bool) -> Iterator[RenderableType]:
    """Everything that a reader needs about one result that did not simply pass.

    The first failing case, unless all of them are wanted in full.
    """
    yield Text.assemble((result.implementation, "bold"), "  ", (result.check, "bold cyan"), f"  {result.meaning}")
    yield plain(f"  {summary.sentence(result)}")
    at_length = result.findings if full else result.findings[:1]
    for finding in at_length:
        yield Padding(_finding_table(finding, summary.sentence(result)), (0, 0, 0, 2))
        if finding.detail:
            yield _account(finding.detail, full=full)
    for account in summary.accounts(result)[: None if full else ACCOUNTS_AT_LENGTH]:
        yield _account(account, full=full)
    if result.expected:
        because = "expected because" if result.verdict is Verdict.EXPECTED_FAILURE else "listed as known"
        yield plain(f"  {because}: {result.expected}")
    if result.remark:
        yield plain(f"  {result.remark}")
    elif result.verdict is Verdict.FAIL and result.findings:
        yield _entry(result)
    yield Text.assemble("  replay: ", (summary.replay_line(result, report), "bold"))


def cause_lines(report: RunReport) -> Iterator[RenderableType]:
    """Return the root causes, each once, with the shortest schedule that shows it and the checks that it breaks."""
    found = causes(report)
    if not found:
        return
    yield Text()
    title = Text(f"{len(found)} root cause{'s' if len(found) > 1 else ''}", style="bold")
    yield Rule(title, style="bold", align="left")
    for cause in found:
        yield Text()
        yield Text.assemble((cause.implementation, "bold"), "  ", plain(cause.sentence))
        if cause.explanation is not None:
            if cause.explanation.place:
                yield plain(f"  module by module: {cause.explanation.place}")
            for line in cause.explanation.schedule:
                yield plain(f"    {line}", style="cyan")
            yield Text(f"  {explanation_line(cause.explanation)}", style="dim")
        if cause.unexplained:
            yield plain(f"  cause: {cause.unexplained}", style="dim")
        yield plain(f"  {cause.scope}")
        expected = ", all expected" if cause.expected else ""
        yield plain(f"  breaks{expected}: {', '.join(result.check for result in cause.results)}")


def _finding_table(finding: Finding, said: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if finding.explanation and finding.explanation != said:
        table.add_row(finding.kind, plain(finding.explanation))
    table.add_row("first at", plain(summary.place_text(finding)))
    table.add_row("tensor" if finding.max_error is not None else "what", plain(finding.quantity))
    if summary.size_text(finding):
        table.add_row("size", Text(summary.size_text(finding)))
    if finding.bound_derivation:
        table.add_row("bound", plain(finding.bound_derivation))
    table.add_row("case", Text(f"{finding.case.identity}: {summary.world_text(finding.case)}"))
    return table


def plain(text: str, style: str = "") -> Text:
    """Return the text of a run as it is: no markup, and no escape sequence that could move a reader's cursor or hide a line."""
    return Text(printable(text), style=style)


def _account(text: str, *, full: bool) -> Text:
    """Return a traceback or an account of ranks: its own line breaks, its beginning and its end unless `full`."""
    lines = text.rstrip().splitlines()
    if not full and len(lines) > HEAD_LINES + TAIL_LINES + 1:
        left_out = len(lines) - HEAD_LINES - TAIL_LINES
        note = f"... {left_out} lines left out (--full shows them) ..."
        lines = [*lines[:HEAD_LINES], note, *lines[-TAIL_LINES:]]
    return plain("\n".join(f"  {line}" for line in lines), style="dim")


def closing_lines(report: RunReport) -> Iterator[Text]:
    """Return one line per implementation, the environment, and what the exit code means."""
    width = max((len(name) for name in summary.implementations(report)), default=0)
    for tally in summary.tallies(report):
        style = next((STYLES[v] for v in summary.ATTENTION if tally.counts[v]), STYLES[Verdict.PASS])
        line = f"{tally.implementation:<{width}}  {tally.sentence}  ({tally.cases} cases, {tally.seconds:.1f} s)"
        yield Text(line, style=style)
    if summary.attention(report, Verdict.EXPECTED_FAILURE) or summary.attention(report, Verdict.FAIL):
        yield Text("--full shows every check and complete accounts, --html DIR draws them", style="dim")
    facts = [f"{key} {value}" for key, value in report.environment.items()]
    worlds = ", ".join(map(str, report.world_sizes))
    facts.append(f"{report.backend} on worlds of {worlds}" if worlds else report.backend)
    if report.tensor_parallel > 1:
        facts.append(f"tensor parallelism over {report.tensor_parallel} ranks")
    yield plain(f"{'; '.join(facts)}; {report.seconds:.1f} s in all", style="dim")
    code = summary.report_exit_code(report)
    yield Text(summary.conclusion(report), style="bold green" if code == 0 else "bold red")
