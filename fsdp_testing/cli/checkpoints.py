"""`fsdp-verify checkpoints NAME...`: does every saved state load into every other implementation and layout?"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.cli.options import Command, Subparsers, add_timeout, declare, sizes

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.search.checkpoints.exchange import Plan
    from fsdp_testing.search.checkpoints.summary import Summary

DESCRIPTION = """\
Train two steps with each implementation at each layout (strategy, mesh, units), save model and optimizer, and load that into
every implementation at every layout: in memory, through a file, and through a directory of torch.distributed.checkpoint.
Parameters, buffers, optimizer state and settings must be equal to the bit, and the next step must be the right one.
"""
CAUSES_SHOWN = 12


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "checkpoints", "load every saved state everywhere", DESCRIPTION)
    command.add_argument("names", nargs="+", metavar="NAME", help="implementations; each saves, and each loads")
    what = command.add_argument_group("what is run")
    what.add_argument(
        "--world-size", type=sizes, default=(2, 3, 4), metavar="N[,N...]", help="numbers of ranks (default 2,3,4)"
    )
    what.add_argument("--subject", action="append", metavar="SUBJECT", help="what is trained; repeatable (default all)")
    what.add_argument(
        "--way", action="append", metavar="WAY", help="memory, file, dcp or async; repeatable (default all)"
    )
    add_timeout(what, 60.0)
    where = command.add_argument_group("where")
    where.add_argument("--html", type=Path, metavar="DIR", help="write DIR/index.html, with the table as a picture")
    where.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON document")
    return command


def execute(options: argparse.Namespace) -> int:
    """Exchange, print, write: 0 if every state holds, 1 if one fails, 3 if one is unknown."""
    from fsdp_testing.report import check_writable
    from fsdp_testing.report.checkpoints_page import write_checkpoints_page
    from fsdp_testing.report.files import write_atomically
    from fsdp_testing.report.terminal import open_console

    if options.html is not None:
        check_writable(options.html / "index.html", "--html")
    if options.json is not None:
        check_writable(options.json, "--json")
    console = open_console()
    summary = _exchanged(_plan(options), console)
    _print(console, summary)
    if options.html is not None:
        page = write_checkpoints_page(summary, options.html)
        console.print(f"written: {page}", markup=False, soft_wrap=True)
    if options.json is not None:
        write_atomically(options.json, summary.to_json() + "\n", option="--json")
        console.print(f"written: {options.json}", markup=False, soft_wrap=True)
    return summary.exit_code


def _plan(options: argparse.Namespace) -> Plan:
    from fsdp_testing.adapters import registry
    from fsdp_testing.errors import InvalidArgument
    from fsdp_testing.search.checkpoints.axes import SUBJECTS, WAYS
    from fsdp_testing.search.checkpoints.exchange import Plan

    for option, given, known in (("--subject", options.subject, SUBJECTS), ("--way", options.way, WAYS)):
        wrong = [one for one in given or () if one not in known]
        if wrong:
            raise InvalidArgument(
                f"{option}: expected one of {', '.join(map(repr, known))}, got {', '.join(map(repr, wrong))}."
            )
    names = tuple(dict.fromkeys(options.names))
    return Plan(
        tuple(registry.load(name) for name in names),
        options.world_size,
        tuple(dict.fromkeys(options.subject or SUBJECTS)),
        tuple(dict.fromkeys(options.way or WAYS)),
        options.timeout,
    )


def _exchanged(plan: Plan, console: Console) -> Summary:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.search.checkpoints.exchange import Exchange, Result
    from fsdp_testing.search.checkpoints.summary import Summary

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    began, failing = time.monotonic(), 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(result: Result) -> None:
            nonlocal failing
            failing += result.verdict is Verdict.FAIL
            progress.update(task, advance=1, description=f"{failing} fail" if failing else "")

        exchange = Exchange(plan, default_pool(), show)
        progress.update(task, total=exchange.total)
        results = exchange.run()
    places = [place.name for place in exchange.places]
    return Summary(environment(), tuple(places), tuple(results), time.monotonic() - began)


def _print(console: Console, summary: Summary) -> None:
    from rich.text import Text

    from fsdp_testing.search.checkpoints.summary import SAVED

    style = {0: "bold green", 1: "bold red"}.get(summary.exit_code, "bold magenta")
    console.print(Text(summary.conclusion(), style=style))
    names = list(dict.fromkeys(place.split()[0] for place in summary.places))
    if len(summary.places) > len(names):
        _print_table(console, "states that hold", summary.by_implementation(), [SAVED, *names])
    numbers = {place: str(number) for number, place in enumerate(summary.places, 1)}
    cells = {
        f"{numbers[saver]:>2} {saver}": {numbers.get(loader, loader): results for loader, results in row.items()}
        for saver, row in summary.cells().items()
    }
    _print_table(console, "saved by", cells, [SAVED, *numbers.values()], short=True)
    for cause in summary.causes()[:CAUSES_SHOWN]:
        console.print(Text(f"{cause.mark} {cause.count:,} x: {cause.example}"), soft_wrap=True)
        console.print(Text(f"  {cause.reason}"), soft_wrap=True)
    more = len(summary.causes()) - CAUSES_SHOWN
    if more > 0:
        console.print(Text(f"and {more} other reasons; --json has all"))


def _print_table(
    console: Console, title: str, rows: dict[str, dict[str, Any]], columns: list[str], *, short: bool = False
) -> None:
    """Show who loads what: how many states hold, or in a small table how the worst of them is."""
    from rich.table import Table
    from rich.text import Text

    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.search.checkpoints.summary import MARKS, worst

    styles = {"=": "", "X": "bold red", "r": "yellow", "?": "magenta"}
    table = Table(box=None, pad_edge=False, padding=(0, 1 if short else 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        shown = []
        for column in columns:
            results = row.get(column)
            if not results:
                shown.append(Text("-", "dim"))
                continue
            held, total = sum(one.verdict is Verdict.PASS for one in results), len(results)
            text = worst(results) if short else f"{held:,}" if held == total else f"{held:,} of {total:,}"
            shown.append(Text(text, styles[worst(results)]))
        table.add_row(name, *shown)
    console.print(table)
    if short:
        console.print(Text("   ".join(f"{mark} {said}" for mark, said in MARKS.items()), "dim"), soft_wrap=True)
