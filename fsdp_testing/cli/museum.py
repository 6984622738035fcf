"""`fsdp-verify museum`: tour real bugs planted in the reference; is every one of them caught?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.museum.tour import Visit

Subparsers = argparse._SubParsersAction  # the only name argparse gives it


def add(commands: Subparsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command = commands.add_parser(
        "museum",
        help="tour real bugs planted in the reference",
        description="Plant each bug of the collection in fsdp_ref and run the checks that must catch it, and the same "
        "checks without it. Exit code 0: every exhibit is caught; 1: one is not.",
        allow_abbrev=False,
    )
    command.add_argument("exhibits", nargs="*", metavar="ID", help="exhibits to visit (default: all)")
    command.add_argument("--list", action="store_true", help="show the collection without running anything")
    command.add_argument("--story", action="store_true", help="tell each exhibit's story too")
    return command


def execute(options: argparse.Namespace) -> int:
    """Tour the exhibits."""
    from rich.console import Console

    from fsdp_testing.museum.tour import chosen, tour

    console = Console(highlight=False)
    selection = chosen(options.exhibits)
    if options.list:
        for exhibit in selection:
            console.print(f"{exhibit.id}  {exhibit.title}", markup=False, soft_wrap=True)
        return 0
    missed = 0
    for visit in tour(selection):
        missed += not visit.caught
        _print_visit(visit, console, story=options.story)
    console.print(f"{len(selection) - missed} of {len(selection)} exhibits caught", style="bold")
    return 1 if missed else 0


def _print_visit(visit: Visit, console: Console, *, story: bool) -> None:
    exhibit = visit.exhibit
    mark, style = ("caught", "green") if visit.caught else ("MISSED", "bold red")
    console.print(f"{exhibit.id}  {mark:<7} {visit.seconds:5.1f} s  {exhibit.title}", style=style, markup=False)
    if story:
        console.print(f"      {exhibit.story} ({exhibit.source})", markup=False, soft_wrap=True)
    for result in visit.results:
        console.print(f"      {result.check}: {result.verdict.value}: {result.explanation[:160]}", markup=False)
    for check in visit.false_alarms:
        console.print(f"      {check} does not pass without the bug either", markup=False, style="yellow")
