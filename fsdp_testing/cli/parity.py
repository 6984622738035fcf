"""`fsdp-verify parity NAME NAME`: do two implementations do the same things in the same order?

Exit code 0 if every case shows the same order, 1 if one differs or breaks a rule of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, count, declare

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.explain.trace.order_parity import CaseParity

DESCRIPTION = """\
Run the same training programs on both implementations, record what their units and collectives do, and show side by
side where the order differs: units and their parameters, unshard and reshard, gather and free, collectives.
"""


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "parity", "unit and event order of two implementations, side by side", DESCRIPTION)
    command.add_argument("left", metavar="NAME", help="an implementation that claims `unit_trace`")
    command.add_argument("right", metavar="NAME", help="another one")
    command.add_argument("--world-size", type=count, default=2, metavar="N", help="number of ranks (default 2)")
    command.add_argument(
        "--model", action="append", default=[], metavar="MODEL", help="models of `list models`; repeatable"
    )
    command.add_argument("--full", action="store_true", help="show equal rows far from any difference too")
    command.add_argument("--html", type=Path, metavar="DIR", help="draw the sequences side by side in DIR/index.html")
    return command


def execute(options: argparse.Namespace) -> int:
    """Compare, print, and say what differs."""
    from fsdp_testing.explain.trace.order_parity import compare_case, parity_cases
    from fsdp_testing.report import check_writable
    from fsdp_testing.report.parity_page import conclusion, write_parity_page
    from fsdp_testing.report.terminal import open_console

    if options.html is not None:
        check_writable(options.html / "index.html", "--html")
    cases = parity_cases(options.left, options.right, options.world_size, options.model)
    console = open_console()
    compared: list[CaseParity] = []
    for case in cases:
        with console.status(f"{case.model.name}, {case.strategy}"):
            compared.append(compare_case(options.left, options.right, case))
        _print_case(compared[-1], options, console)
    different = sum(not found.equal for found in compared)
    said = conclusion(different, len(cases))
    console.print(f"{options.left} and {options.right}: {said}", markup=False, soft_wrap=True)
    if options.html is not None:
        path = write_parity_page(compared, (options.left, options.right), options.html, full=options.full)
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 1 if different else 0


def _print_case(found: CaseParity, options: argparse.Namespace, console: Console) -> None:
    from rich.text import Text

    from fsdp_testing.report.parity_page import differing_aspects
    from fsdp_testing.report.side_by_side import by_difference, order_table

    case = found.case
    title = Text(f"{case.model.name}, {case.strategy}, {case.world.size} ranks: ", style="bold")
    aspects = dict.fromkeys(comparison.aspect for comparison in found.comparisons)
    differing = differing_aspects(found)
    same = [aspect for aspect in aspects if aspect not in differing]
    title.append(
        f"differ in {', '.join(differing)}" if differing else "same order", style="yellow" if differing else "green"
    )
    if differing and same:
        title.append(f" (same {', '.join(same)})", style="dim")
    console.print(title, soft_wrap=True)
    for fault in found.faults:
        console.print(Text(f"  {fault}", style="red"), soft_wrap=True)
    for comparison, ranks in by_difference(found.comparisons):
        console.print(Text(f"  {comparison.aspect}, rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}", style="bold"))
        console.print(order_table(comparison, options.left, options.right, full=options.full))
    if options.full and not differing:
        for comparison in found.comparisons[: len(aspects)]:
            console.print(Text(f"  {comparison.aspect}, rank {comparison.rank}", style="bold"))
            console.print(order_table(comparison, options.left, options.right, full=True))


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
