"""`fsdp-verify museum`: does the harness catch the real bugs of the field?

Exit code 0 if every exhibit is caught by every check that must catch it (and with --fuzz is met by random cases), 1 if
one escapes.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.errors import HarnessError

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.museum.exhibit import Exhibit
    from fsdp_testing.museum.hunt import Hunt
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
    command.add_argument(
        "--fuzz", action="store_true", help="hunt each with random cases too, and say how many it took"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the random cases (default 0)")
    return command


def execute(options: argparse.Namespace) -> int:
    """Tour, and say what escaped."""
    from fsdp_testing.museum.hunt import hunt
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
    escaped = unmet = hunted = 0
    hunter = (lambda exhibit, seed, limit: hunt(exhibit, seed, limit=limit)) if options.fuzz else None
    for visit in tour(selection, hunter=hunter, seed=options.seed):
        escaped += not visit.caught
        hunted += visit.hunt is not None
        unmet += visit.hunt is not None and visit.hunt.cases is None
        _print_visit(visit, console)
    told = f"{escaped} of {len(selection)} exhibits escaped" if escaped else f"all {len(selection)} exhibits are caught"
    console.print(told, style="bold red" if escaped else "bold green")
    if options.fuzz:
        console.print(f"random cases met {hunted - unmet} of {hunted} exhibits", style="red" if unmet else "green")
    return 1 if escaped or unmet else 0


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
    for result in visit.results if visit.caught else ():
        console.print(Text(f"         caught by {result.check}", style="dim"), soft_wrap=True)
    if visit.hunt is not None:
        console.print(Text(f"         {_hunt_told(visit.hunt)}", style="dim"), soft_wrap=True)


def _hunt_told(hunt: Hunt) -> str:
    if hunt.cases is None:
        return (
            f"not met in {hunt.run} random cases ({hunt.seconds:.0f} s){'; ' if hunt.sentence else ''}{hunt.sentence}"
        )
    return f"met after {hunt.cases} random cases ({hunt.seconds:.0f} s)"
