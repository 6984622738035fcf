"""`fsdp-verify checkpoints NAME...`: every saved state, loaded into every other implementation and layout."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, add_timeout, add_world_sizes, declare
from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present

if TYPE_CHECKING:
    from fsdp_testing.report.terminal import Output
    from fsdp_testing.search.checkpoints.exchange import Plan
    from fsdp_testing.search.checkpoints.summary import Summary

DESCRIPTION = """\
Train two steps with each implementation at each layout (strategy, mesh, units), save model and optimizer, and load that into
every implementation at every layout: in memory, through a file, and through a directory of torch.distributed.checkpoint.
Parameters, buffers, optimizer state and settings must be equal to the bit, and the next step must be right.
"""
EXAMPLE = "fsdp-verify checkpoints torch-fsdp1 torch-fsdp2 --world-size 2,3"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands, "checkpoints", "load every saved state with every implementation", DESCRIPTION, example=EXAMPLE
    )
    command.add_argument("names", nargs="+", metavar="NAME", help="implementations; each saves, and each loads")
    what = command.add_argument_group("what is run")
    add_world_sizes(what, "numbers of ranks (default 2,3,4)", (2, 3, 4))
    what.add_argument("--subject", action="append", metavar="SUBJECT", help="what is trained; repeatable (default all)")
    what.add_argument(
        "--way", action="append", metavar="WAY", help="memory, file, dcp or async; repeatable (default all)"
    )
    add_timeout(what, 60.0)
    where = command.add_argument_group("where")
    add_html(where)
    add_json(where, "all results")
    return command


def execute(options: argparse.Namespace) -> int:
    """Exchange, print, write: 0 if every state holds, 1 if one fails, 3 if one is unknown."""
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.checkpoints.summary import checkpoints_sheet

    paths = checked_outputs(options)
    console = open_console()
    summary = _exchanged(_plan(options), console)
    return present(checkpoints_sheet(summary), console, paths, {"--json": lambda: summary.to_json() + "\n"})


def _plan(options: argparse.Namespace) -> Plan:
    from fsdp_testing.adapters import registry
    from fsdp_testing.errors import InvalidArgument
    from fsdp_testing.search.checkpoints.axes import SUBJECTS, WAYS
    from fsdp_testing.search.checkpoints.exchange import Plan

    for option, given, known in (("--subject", options.subject, SUBJECTS), ("--way", options.way, WAYS)):
        wrong = [name for name in given or () if name not in known]
        if wrong:
            raise InvalidArgument(
                f"{option}: expected one of {', '.join(map(repr, known))}, got {', '.join(map(repr, wrong))}."
            )
    names = tuple(dict.fromkeys(options.names))
    plan = Plan(
        tuple(registry.load(name) for name in names),
        options.world_size,
        tuple(dict.fromkeys(options.subject or SUBJECTS)),
        tuple(dict.fromkeys(options.way or WAYS)),
        options.timeout,
    )
    asked = {subject for place in plan.places() for subject in plan.subjects if plan.asks(place, subject)}
    if idle := [subject for subject in options.subject or () if subject not in asked]:
        raise InvalidArgument(
            f"--subject: expected subjects that an implementation claims, got {', '.join(map(repr, idle))}: "
            f"{'. '.join(plan.not_asked())}. Leave them out."
        )
    return plan


def _exchanged(plan: Plan, console: Output) -> Summary:
    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.report.progress import Display
    from fsdp_testing.search.checkpoints.exchange import Exchange, Result
    from fsdp_testing.search.checkpoints.summary import Summary

    began = time.monotonic()
    verdicts: Counter[Verdict] = Counter()
    with Display(console, "states") as display:

        def show(result: Result) -> None:
            verdicts[result.verdict] += 1
            failing = verdicts[Verdict.FAIL]
            display.at(verdicts.total(), f"{failing:,} fail" if failing else "", exchange.total)

        exchange = Exchange(plan, default_pool(), show)
        display.stage(f"saving and loading, {exchange.total:,} states in all", exchange.total)
        results = exchange.run()
    places = [place.name for place in exchange.places]
    return Summary(environment(), tuple(places), tuple(results), time.monotonic() - began, tuple(plan.not_asked()))
