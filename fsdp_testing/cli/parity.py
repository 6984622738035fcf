"""`fsdp-verify parity NAME NAME`: unit and event order of two implementations.

Exit code 0 if every case shows the same order, 1 if one differs or breaks a rule.
"""

from __future__ import annotations

import argparse

from fsdp_testing.cli.options import Command, Subparsers, count, declare
from fsdp_testing.cli.outputs import add_html, checked_outputs, present

DESCRIPTION = """\
Run the same training programs on both implementations, record what their units and collectives do, and show side by
side where the order differs: units and their parameters, unshard and reshard, gather and free, collectives.
"""
EXAMPLE = "fsdp-verify parity torch-fsdp1 torch-fsdp2 --html order.html"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands, "parity", "compare unit and event order of two implementations", DESCRIPTION, example=EXAMPLE
    )
    command.add_argument("left", metavar="NAME", help="an implementation that claims `unit_trace`")
    command.add_argument("right", metavar="NAME", help="another one")
    command.add_argument("--world-size", type=count, default=2, metavar="N", help="number of ranks (default 2)")
    command.add_argument(
        "--model", action="append", default=[], metavar="MODEL", help="models of `list models`; repeatable"
    )
    command.add_argument("--full", action="store_true", help="show equal rows far from any difference too")
    add_html(command)
    return command


def execute(options: argparse.Namespace) -> int:
    """Compare, print the differences, and return the exit code."""
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.explain.trace.order_parity import compare_case, parity_cases
    from fsdp_testing.report.parity import parity_sheet
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.terminal import open_console

    paths = checked_outputs(options)
    cases = parity_cases(options.left, options.right, options.world_size, options.model)
    console = open_console()
    compared = []
    with Display(console) as display:
        for case in cases:
            display.stage(f"{case.model.name}, {case.strategy}")
            compared.append(compare_case(options.left, options.right, case))
    sheet = parity_sheet(compared, (options.left, options.right), environment(), full=options.full)
    return present(sheet, console, paths, {}, full=options.full)
