"""`fsdp-verify certify NAME`: every small case, run and judged."""

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
    path_of,
    seconds,
)
from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present

if TYPE_CHECKING:
    from fsdp_testing.report.terminal import Output
    from fsdp_testing.search.certificate.certify import Certificate, Plan
    from fsdp_testing.search.certificate.summary import Summary

DESCRIPTION = """\
Run every small case: two steps on at most 4 ranks, with at most 3 micro-batches and 3 units. Strategy, dtypes, synchronisation
and clearing of gradients vary; one part is unused, frozen, shared or called twice. `run` and `fuzz` judge in the
same way. A run continues where the last one in DIR ended. Ctrl-C leaves everything on disk.
"""
EXAMPLE = "fsdp-verify certify torch-fsdp1 --sample 500 --html certificate.html"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "certify", "run every small case", DESCRIPTION, example=EXAMPLE)
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
        help="seconds to find causes and shortest schedules of failures (default 60; 0: none)",
    )
    where = command.add_argument_group("where")
    where.add_argument(
        "--state", type=path_of, metavar="DIR", help="default: .fsdp-certificate/NAME, by sample and shard"
    )
    add_jobs(where, "batches")
    add_html(where)
    add_json(where, "the certificate")
    return command


def execute(options: argparse.Namespace) -> int:
    """Run cells, explain what fails, print, write: 0 if all that ran hold, 1 if one fails, 3 if one is unknown."""
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.certificate.certify import Certificate
    from fsdp_testing.search.certificate.sheet import certificate_sheet
    from fsdp_testing.search.state import held

    paths = checked_outputs(options)
    console = open_console()
    plan = _plan(options)
    with held(plan.state):
        certificate = Certificate(plan, default_pool())
        try:
            summary = _made(certificate, console, options.explain)
        except KeyboardInterrupt:
            console.say(f"interrupted; all results so far are in {plan.state}")
            raise
    return present(certificate_sheet(summary), console, paths, {"--json": lambda: summary.to_json() + "\n"})


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


def _made(certificate: Certificate, console: Output, explain: float) -> Summary:
    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.checks.findings.known import shipped_known
    from fsdp_testing.report.progress import Display
    from fsdp_testing.search.certificate.causes import CauseFinder
    from fsdp_testing.search.certificate.summary import summary_of

    total = len(certificate.cells)
    with Display(console, "cells") as display:

        def show(certificate: Certificate) -> None:
            counts = certificate.verdicts.counts()
            failing = counts[Verdict.FAIL]
            display.at(counts.total(), f"{failing:,} fail" if failing else "", total)

        display.stage(f"running cells, {certificate.earlier:,} of {total:,} are already done", total)
        show(certificate)
        certificate.run(show)
        display.stage("looking for causes")
        adapter = certificate.plan.implementation
        finder = CauseFinder(certificate, shipped_known(adapter.built_on), explain)
        return summary_of(certificate, finder, environment())
