"""`fsdp-verify museum`: does the harness catch the real bugs of the field?

Exit code 0 if every exhibit is caught by every check that must catch it, 1 if one escapes.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.errors import HarnessError

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.museum.exhibit import Exhibit
    from fsdp_testing.museum.tour import Visit

Subparsers = argparse._SubParsersAction  # the only name argparse gives it


def add(commands: Subparsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command = commands.add_parser(
        "museum",
        help="tour the real bugs that the harness must catch",
        description="Plant each exhibit in the reference, run the checks that must catch it, and say which did.",
        allow_abbrev=False,
    )
    command.add_argument("exhibits", nargs="*", metavar="ID", help="exhibits such as B036; all without")
    command.add_argument("--list", action="store_true", help="tell each story and its sources; run nothing")
    return command


def execute(options: argparse.Namespace) -> int:
    """Tour, and say what escaped."""
    from fsdp_testing.museum.tour import chosen, tour
    from fsdp_testing.report.terminal import open_console

    selection = chosen(options.exhibits)
    if not selection:
        raise HarnessError("museum: expected exhibits, got an empty collection. Nothing was shown by this tour.")
    console = open_console()
    if options.list:
        for exhibit in selection:
            _print_story(exhibit, console)
        return 0
    escaped = 0
    for visit in tour(selection):
        escaped += not visit.caught
        _print_visit(visit, console)
    told = f"{escaped} of {len(selection)} exhibits escaped" if escaped else f"all {len(selection)} exhibits are caught"
    console.print(told, style="bold red" if escaped else "bold green")
    return 1 if escaped else 0


def _print_story(exhibit: Exhibit, console: Console) -> None:
    from rich.text import Text

    kind = "silently wrong" if exhibit.silent else "an error"
    console.print(Text.assemble((exhibit.id, "bold"), f"  {exhibit.title} ({kind}, {exhibit.path})"), soft_wrap=True)
    console.print(Text(f"  {exhibit.story}"), soft_wrap=True)
    console.print(Text(f"  caught by {', '.join(exhibit.checks)}; {exhibit.source}", style="dim"), soft_wrap=True)


def _print_visit(visit: Visit, console: Console) -> None:
    from rich.text import Text

    word = ("caught ", "green") if visit.caught else ("ESCAPED", "bold red")
    title = f" {visit.exhibit.id}  {visit.exhibit.title}  ({visit.seconds:.1f} s)"
    console.print(Text.assemble(word, title), soft_wrap=True)
    for check in visit.missed:
        console.print(Text(f"         {check} does not fail on it", style="red"), soft_wrap=True)
    for check in visit.false_alarms:
        told = f"         {check} does not pass without it, so its failure proves nothing"
        console.print(Text(told, style="red"), soft_wrap=True)
    if visit.random_cases is not None:
        console.print(Text(f"         found by the fuzzer after {visit.random_cases} random cases", style="dim"))
