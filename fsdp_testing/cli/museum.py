"""`fsdp-verify museum`: does the harness catch the real bugs of the field?

Exit code 0 if every exhibit is caught by every check that must catch it (and with --fuzz is met by random cases), 1 if
one escapes.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, add_jobs, add_seed, capacity_here, count, declare, seconds
from fsdp_testing.errors import HarnessError, InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.museum.tour import Visit
    from fsdp_testing.report.terminal import Output


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands,
        "museum",
        "tour the real bugs that the harness must catch",
        "Plant each exhibit in the reference, run the checks that must catch it, and say which did.",
    )
    command.add_argument("ids", nargs="*", metavar="ID", help="exhibits such as B036; all without")
    command.add_argument("--list", action="store_true", help="print each story and its sources; run nothing")
    command.add_argument(
        "--fuzz", action="store_true", help="hunt each with random cases too, and say how many it took"
    )
    command.add_argument(
        "--exhibits",
        type=count,
        metavar="N",
        help="hunt N exhibits, chosen by --seed, with random cases alone; each for at most --seconds",
    )
    add_seed(command, "of the random cases, and of the choice of --exhibits")
    command.add_argument(
        "--seconds", type=seconds, default=60.0, metavar="N", help="for each of --exhibits (default 60)"
    )
    add_jobs(command, "exhibits")
    return command


def execute(options: argparse.Namespace) -> int:
    """Tour, or hunt, and say what escaped."""
    if options.exhibits is not None:
        if options.ids or options.list or options.jobs:
            raise InvalidArgument(
                "museum: expected --exhibits N alone, got IDs, --list or --jobs too. Drop one of them."
            )
        return hunt_exhibits(options.exhibits, options.seed, seconds=options.seconds)
    from fsdp_testing.museum.tour import chosen, tour
    from fsdp_testing.report.terminal import open_console

    selection = chosen(options.ids)
    if not selection:
        raise HarnessError("museum: expected exhibits, got an empty collection. Nothing was shown by this tour.")
    console = open_console()
    if options.list:
        for exhibit in selection:
            kind = "silently wrong" if exhibit.silent else "an error"
            console.say((exhibit.id, "bold"), f"  {exhibit.title} ({kind}, {exhibit.path})")
            console.say(f"  {exhibit.story}")
            console.say(f"  caught by {', '.join(exhibit.checks)}; {exhibit.source}", style="dim")
        return 0
    escaped = unmet = hunted = 0
    room = capacity_here(max(size for exhibit in selection for size in exhibit.world_sizes))
    jobs = room.jobs(options.jobs)
    console.say(f"exhibits under way at a time: {room.said(jobs)}")
    for visit in tour(selection, hunted=options.fuzz, seed=options.seed, jobs=jobs):
        escaped += not visit.caught
        hunted += visit.hunt is not None
        unmet += visit.hunt is not None and visit.hunt.cases is None
        _print_visit(visit, console)
    said = f"{escaped} of {len(selection)} exhibits escaped" if escaped else f"all {len(selection)} exhibits are caught"
    console.say(said, style="bold red" if escaped else "bold green")
    if options.fuzz:
        console.say(f"random cases met {hunted - unmet} of {hunted} exhibits", style="red" if unmet else "green")
    return 1 if escaped or unmet else 0


def hunt_exhibits(number: int, seed: int, *, seconds: float, limit: int | None = None) -> int:
    """Hunt exhibits with random cases and say how many each took: 0 if every one was met, 1 if not.

    Args:
        number: So many exhibits, chosen by `seed`.
        seed: All choices follow from it.
        seconds: For each exhibit, at most.
        limit: Random cases for each, at most; None for the number within which an exhibit must be met.
    """
    from fsdp_testing.museum.hunt import RANDOM_CASES, drawn_exhibits, hunt
    from fsdp_testing.report.terminal import open_console

    console = open_console()
    unmet = 0
    for exhibit in drawn_exhibits(number, seed):
        ended = hunt(exhibit, seed, limit=limit or RANDOM_CASES, seconds=seconds)
        unmet += ended.cases is None
        word = ("NOT MET", "bold red") if ended.cases is None else ("met    ", "green")
        facts = f" {exhibit.id}  {exhibit.title}: {ended.run} random cases, {ended.seconds:.1f} s"
        console.say(word, facts)
        if ended.sentence:
            console.say(f"         {ended.sentence}", style="dim")
    console.say(f"{number - unmet} of {number} exhibits were met")
    return 1 if unmet else 0


def _print_visit(visit: Visit, console: Output) -> None:
    word = ("caught ", "green") if visit.caught else ("ESCAPED", "bold red")
    title = f" {visit.exhibit.id}  {visit.exhibit.title}  ({visit.seconds:.1f} s)"
    console.say(word, title)
    for check in visit.missed:
        console.say(f"         {check} does not fail on it", style="red")
    for check in visit.false_alarms:
        console.say(f"         {check} does not pass without it, so its failure proves nothing", style="red")
    for result in visit.results if visit.caught else ():
        console.say(f"         caught by {result.check}", style="dim")
    hunt = visit.hunt
    if hunt is not None:
        met = f"met after {hunt.cases}" if hunt.cases is not None else f"not met in {hunt.run}"
        more = f"; {hunt.sentence}" if hunt.sentence and hunt.cases is None else ""
        console.say(f"         {met} random cases ({hunt.seconds:.0f} s){more}", style="dim")
