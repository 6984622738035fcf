"""How does a report look in a terminal? A table by check and implementation, then every failure, then what it means."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fsdp_testing.records import CheckResult, Finding, RunReport, Verdict
from fsdp_testing.report import summary

# Colour repeats what the word says; nothing is told by colour alone.
STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.UNKNOWN: "bold magenta",
    Verdict.NOT_CLAIMED: "dim",
    Verdict.EXPECTED_FAILURE: "yellow",
    Verdict.STALE: "bold yellow",
}
DETAIL_LINES = 30
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FINDINGS_SHOWN = 3


def print_report(report: RunReport, console: Console, *, full: bool = False) -> None:
    """Print the whole report.

    Args:
        report: What was found.
        console: Where to; its width decides the layout.
        full: Show complete tracebacks and all findings instead of their beginning.
    """
    console.print(verdict_table(report))
    for verdict in summary.ATTENTION:
        results = summary.attention(report, verdict)
        if results:
            console.print()
            console.print(Rule(_heading(verdict, len(results)), style=STYLES[verdict], align="left"))
            for result in results:
                console.print(Padding(result_account(result, report, full=full), (1, 0, 0, 0)))
    console.print()
    for line in closing_lines(report):
        console.print(line, soft_wrap=True)


def verdict_table(report: RunReport) -> Table:
    """Checks by implementations."""
    found = summary.matrix(report)
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("check", overflow="fold", ratio=1)
    for name in found.implementations:
        table.add_column(name, justify="left", overflow="fold")
    for suite, rows in found.suites:
        table.add_row(Text(suite, style="bold"))
        for row in rows:
            label = row.check.removeprefix(f"{suite}.")
            table.add_row(f"  {label}", *(cell(result) for result in row.results))
    return table


def cell(result: CheckResult | None) -> Text:
    """A verdict as one coloured word; `not run` where there is no result at all."""
    if result is None:
        return Text("not run", style="dim")
    return Text(summary.WORDS[result.verdict], style=STYLES[result.verdict])


def result_account(result: CheckResult, report: RunReport, *, full: bool) -> RenderableType:
    """Everything that a reader needs about one result that did not simply pass."""
    parts: list[RenderableType] = [
        Text.assemble((result.implementation, "bold"), "  ", (result.check, "bold cyan"), f"  {result.meaning}"),
        Padding(told(summary.sentence(result)), (0, 0, 0, 2)),
    ]
    shown = result.findings if full else result.findings[:FINDINGS_SHOWN]
    for finding in shown:
        parts.append(Padding(_finding_table(finding, result, full=full), (0, 0, 0, 2)))
    if len(result.findings) > len(shown):
        parts.append(Text(f"  and {len(result.findings) - len(shown)} more failing cases (--full shows them)"))
    for account in summary.accounts(result)[: None if full else FINDINGS_SHOWN]:
        parts.append(Padding(told(_shortened(account, full=full), style="dim"), (0, 0, 0, 2)))
    if result.expected:
        parts.append(told(f"  expected because: {result.expected}"))
    parts.append(Text.assemble("  replay: ", (summary.replay_line(result, report), "bold")))
    return Group(*parts)


def _finding_table(finding: Finding, result: CheckResult, *, full: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    # The first finding's sentence is the result's own; said once.
    if finding.explanation and finding.explanation != summary.sentence(result):
        table.add_row(finding.kind, told(finding.explanation))
    table.add_row("first at", told(summary.place_text(finding)))
    table.add_row("tensor" if finding.max_error is not None else "what", told(finding.quantity))
    if summary.size_text(finding):
        table.add_row("size", Text(summary.size_text(finding)))
    if finding.bound_derivation:
        table.add_row("bound", told(finding.bound_derivation))
    table.add_row("case", Text(f"{finding.case.identity}: {summary.world_text(finding)}"))
    if not finding.detail:
        return table
    return Group(table, told(_shortened(finding.detail, full=full), style="dim"))


def told(text: str, style: str = "") -> Text:
    """Text of a run as it is: no markup, and no escape sequence that could move a reader's cursor or hide a line."""
    return Text(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), style=style)


def _shortened(text: str, *, full: bool) -> str:
    lines = text.rstrip().splitlines()
    if full or len(lines) <= DETAIL_LINES:
        return "\n".join(lines)
    half = DETAIL_LINES // 2
    left_out = len(lines) - 2 * half
    return "\n".join([*lines[:half], f"... {left_out} lines left out (--full shows them) ...", *lines[-half:]])


def _heading(verdict: Verdict, count: int) -> Text:
    noun = "check" if count == 1 else "checks"
    return Text(f"{count} {noun} {summary.WORDS[verdict]}: {summary.MEANINGS[verdict]}")


def closing_lines(report: RunReport) -> Iterator[Text]:
    """One line per implementation, the environment, and what the exit code means."""
    width = max((len(name) for name in summary.implementations(report)), default=0)
    for tally in summary.tallies(report):
        style = next((STYLES[v] for v in summary.ATTENTION if tally.counts[v]), STYLES[Verdict.PASS])
        line = f"{tally.implementation:<{width}}  {tally.sentence}  ({tally.cases} cases, {tally.seconds:.1f} s)"
        yield Text(line, style=style)
    facts = [f"{key} {value}" for key, value in report.environment.items()]
    worlds = ", ".join(map(str, report.world_sizes))
    facts.append(f"{report.backend} on worlds of {worlds}" if worlds else report.backend)
    yield told(f"{'; '.join(facts)}; {report.seconds:.1f} s in all", style="dim")
    code = summary.report_exit_code(report)
    yield Text(summary.conclusion(report), style="bold green" if code == 0 else "bold red")
