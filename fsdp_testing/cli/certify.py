"""`fsdp-verify certify NAME`: does it hold in every small case?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.cli.fuzz import batches_at_a_time
from fsdp_testing.cli.options import (
    Command,
    Subparsers,
    add_jobs,
    add_timeout,
    allowance,
    count,
    declare,
    part,
    seconds,
)

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.search.certificate.certify import Certificate, Plan
    from fsdp_testing.search.certificate.summary import Summary

DESCRIPTION = """\
Run every small case: meshes of at most 4 ranks, accumulation of at most 3 micro-batches in every pattern of
synchronising, forms of clearing gradients, strategies, dtypes, at most 3 units with one part unused, frozen, shared or called
twice; two steps. Each is judged as `run` and `fuzz` judge it. A run goes on where the last one in DIR ended. Ctrl-C ends it
with everything on disk.
"""
REASONS_SHOWN = 8


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "certify", "run every small case", DESCRIPTION)
    command.add_argument("name", metavar="NAME", help="implementation")
    what = command.add_argument_group("what is run")
    what.add_argument("--sample", type=count, metavar="N", help="only N cells, spread over all faces")
    what.add_argument("--shard", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts, for N machines")
    what.add_argument("--cells", type=count, metavar="N", help="end after about N cells")
    what.add_argument("--seconds", type=seconds, metavar="N", help="end after N seconds")
    add_timeout(what, 60.0)
    what.add_argument(
        "--explain",
        type=allowance,
        default=60.0,
        metavar="SECONDS",
        help="spent on the causes of failures, to find the shortest schedules (default 60; 0: none)",
    )
    where = command.add_argument_group("where")
    where.add_argument("--state", type=Path, metavar="DIR", help="default: .fsdp-certificate/NAME, by sample and shard")
    add_jobs(where, "batches")
    where.add_argument("--html", type=Path, metavar="DIR", help="write DIR/index.html, with the cube as a picture")
    where.add_argument("--json", type=Path, metavar="FILE", help="write the certificate as one JSON document")
    return command


def execute(options: argparse.Namespace) -> int:
    """Run cells, explain what fails, print, write: 0 if all that ran hold, 1 if one fails, 3 if one is unknown."""
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.report import check_writable
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.certificate.certify import Certificate

    if options.html is not None:
        check_writable(options.html / "index.html", "--html")
    if options.json is not None:
        check_writable(options.json, "--json")
    console = open_console()
    certificate = Certificate(_plan(options), default_pool())
    try:
        summary = _made(certificate, console, options.explain)
    except KeyboardInterrupt:
        console.print(f"interrupted; everything up to here is in {certificate.plan.state}", markup=False)
        raise
    return present(summary, options, console)


def present(summary: Summary, options: argparse.Namespace, console: Console) -> int:
    """Print a certificate, write what `--html` and `--json` ask for, and return the exit code."""
    from fsdp_testing.report.certificate_page import write_certificate_page
    from fsdp_testing.report.files import write_atomically
    from fsdp_testing.search.certificate.axes import WORLDS
    from fsdp_testing.search.certificate.summary import FACES

    _print(console, summary)
    if options.html is not None:
        worlds = [f"{strategy} {mesh}" for strategy, meshes in WORLDS.items() for mesh in meshes]
        page = write_certificate_page(summary, FACES, worlds, options.html)
        console.print(f"written: {page}", markup=False, soft_wrap=True)
    if options.json is not None:
        write_atomically(options.json, summary.to_json() + "\n", option="--json")
        console.print(f"written: {options.json}", markup=False, soft_wrap=True)
    return summary.exit_code


def _plan(options: argparse.Namespace) -> Plan:
    from fsdp_testing.adapters import registry
    from fsdp_testing.search.certificate.axes import FLAT, ranks_of
    from fsdp_testing.search.certificate.certify import Plan

    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in options.name)
    folder += f"-sample-{options.sample}" if options.sample else ""
    folder += "-shard-{}-of-{}".format(*options.shard) if options.shard != (1, 1) else ""
    return Plan(
        registry.load(options.name),
        options.state or Path(".fsdp-certificate") / folder,
        options.sample,
        options.shard,
        options.cells,
        options.seconds,
        batches_at_a_time(options.jobs, max(map(ranks_of, FLAT))),
        options.timeout,
    )


def _made(certificate: Certificate, console: Console, explain: float) -> Summary:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.checks.findings.known import shipped_known
    from fsdp_testing.search.certificate.causes import CauseFinder
    from fsdp_testing.search.certificate.summary import summary_of

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total, earlier = len(certificate.cells), certificate.earlier
        task = progress.add_task("starting ranks", total=total, completed=earlier)

        def show(certificate: Certificate) -> None:
            counts = certificate.verdicts.counts()
            failing = counts[Verdict.FAIL]
            progress.update(task, completed=counts.total(), description=f"{failing} fail" if failing else "")

        certificate.run(show)
        progress.update(task, description="looking for causes")
        adapter = certificate.plan.implementation
        finder = CauseFinder(certificate, shipped_known(adapter.built_on), explain)
        return summary_of(certificate, finder, environment())


def _print(console: Console, summary: Summary) -> None:
    from rich.text import Text

    style = {0: "bold green", 1: "bold red"}.get(summary.exit_code, "bold magenta")
    console.print(Text(f"{summary.implementation}: {summary.conclusion()}", style=style))
    for note in summary.notes():
        console.print(Text(note))
    for tags, number in list(summary.not_claimed.items())[:REASONS_SHOWN]:
        console.print(Text(f"  {number:,} need {tags}", style="dim"))
    for reason, number in list(summary.reasons.items())[:REASONS_SHOWN]:
        console.print(Text(f"  {number:,} x {reason}"))
    _print_faces(console, summary)
    for cause in summary.causes:
        console.print(Text(f"\n{cause.signature}: {cause.cells:,} cells, the simplest {cause.cell.name}", style="bold"))
        known = f"known failure {cause.known} {cause.link}".rstrip() + ". " if cause.known else ""
        console.print(Text(f"{known}{cause.reason}"))
        for line in cause.schedule:
            console.print(Text(f"  {line}"))


def _print_faces(console: Console, summary: Summary) -> None:
    """Show the cube as a table: every face but schedules that hold everywhere."""
    from rich.table import Table
    from rich.text import Text

    from fsdp_testing.search.certificate.axes import WORLDS
    from fsdp_testing.search.certificate.summary import FACES, VERDICTS

    passes = VERDICTS[0]
    strategies = [strategy for strategy in WORLDS if summary.at(strategy, "all")]
    rows = [(f"mesh: {mesh}", mesh, "all") for mesh in dict.fromkeys(m for s in strategies for m in WORLDS[s])]
    rows += [(face, "", face) for face in FACES[1:]]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("cells that hold")
    for strategy in strategies:
        table.add_column(strategy, justify="right")
    for label, mesh, face in rows:
        found = [summary.at(f"{strategy} {mesh}".strip(), face) for strategy in strategies]
        if label.startswith("first: ") and all(set(counts) <= {passes} for counts in found):
            continue
        shown = [
            Text(
                f"{counts[passes]:,}" if counts[passes] == total else f"{counts[passes]:,} of {total:,}", _style(counts)
            )
            if (total := sum(counts.values()))
            else Text("-", "dim")
            for counts in found
        ]
        table.add_row(label, *shown)
    console.print(table)


def _style(counts: dict[str, int]) -> str:
    return "bold red" if counts.get("fail") else "magenta" if counts.get("unknown") else ""
