"""`fsdp-verify parity`: do two implementations handle units and collectives in the same order? Side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.errors import InvalidArgument, WorldFailed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fsdp_testing.checkers.order import OrderComparison
    from fsdp_testing.trace.parity import CaseParity

Subparsers = argparse._SubParsersAction  # the only name argparse gives it
CONTEXT_ROWS = 4


def add(commands: Subparsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command = commands.add_parser(
        "parity",
        help="unit and event order of two implementations, side by side",
        description="Trace the same cases on two implementations and compare the order of units, of their unshard and "
        "reshard, and of collectives. Exit code 0: the same; 1: they differ, or one breaks a rule of its own.",
        allow_abbrev=False,
    )
    command.add_argument("left", metavar="NAME", help="an implementation that claims unit_trace")
    command.add_argument("right", metavar="NAME", help="another one")
    command.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default 2)")
    command.add_argument("--model", action="append", default=[], metavar="MODEL", help="model of the zoo; repeatable")
    command.add_argument("--full", action="store_true", help="show every row, not only those around differences")
    return command


def execute(options: argparse.Namespace) -> int:
    """Compare and print; the worst finding decides the exit code."""
    from rich.console import Console

    from fsdp_testing.trace.parity import compare_case, parity_cases

    if options.world_size < 1:
        raise InvalidArgument(f"--world-size: expected at least 1, got {options.world_size}. Give the number of ranks.")
    console = Console(highlight=False)
    code = 0
    for case in parity_cases(options.left, options.right, options.world_size, options.model):
        where = f"{case.model.name}, {case.strategy}, {case.world.size} ranks"
        try:
            found = compare_case(options.left, options.right, case)
        except WorldFailed as error:
            console.print(f"{where}: unknown", style="bold yellow", markup=False)
            console.print(str(error), markup=False, soft_wrap=True)
            code = 3
            continue
        _print_case(where, found, console, full=options.full)
        code = max(code, 0 if found.equal else 1)
    return code


def _print_case(where: str, found: CaseParity, console: Console, *, full: bool) -> None:
    told = "same order" if found.equal else "order differs"
    console.print(f"{where}: {told}", style="bold green" if found.equal else "bold red", markup=False)
    for fault in found.faults:
        console.print(f"  {fault}", markup=False, soft_wrap=True)
    for comparison in found.comparisons:
        count = sum(not row.same for row in comparison.rows)
        if comparison.rank == 0 or count:
            tail = "equal" if not count else f"{count} of {len(comparison.rows)} rows differ"
            console.print(f"  {comparison.aspect}, rank {comparison.rank}: {tail}", markup=False)
        # Ranks run one program: what rank 0 shows in full need not be shown again.
        if (comparison.rank == 0 and count) or (full and comparison.rank == 0):
            console.print(_table(comparison, found, full=full))


def _table(comparison: OrderComparison, found: CaseParity, *, full: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("    ", found.left.implementation, found.right.implementation):
        table.add_column(header, overflow="fold")
    last = -1
    for index in _shown(comparison, full=full):
        if index > last + 1:
            table.add_row("", Text("…", style="dim"), "")
        row = comparison.rows[index]
        style = "" if row.same else "red"
        table.add_row("    " if row.same else "  ≠ ", Text(row.left, style=style), Text(row.right, style=style))
        last = index
    return table


def _shown(comparison: OrderComparison, *, full: bool) -> list[int]:
    if full:
        return list(range(len(comparison.rows)))
    differing = [index for index, row in enumerate(comparison.rows) if not row.same]
    near = {i for d in differing for i in range(d - CONTEXT_ROWS, d + CONTEXT_ROWS + 1)}
    return [index for index in range(len(comparison.rows)) if index in near]
