"""`fsdp-verify museum`: plant real bugs of the field, one at a time, and see whether the harness catches each.

Exit code 0 if every one is caught by each check that must catch it (and with --fuzz is met by random cases), 1 if one
escapes.
"""

# The command line is that of the package, which calls `main` in a checkout.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_testing.cli.options import add_jobs, add_seed, capacity_here, count, seconds
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.report.terminal import Output, open_console

sys.path[:0] = [] if (BROKEN := str(Path(__file__).parent / "broken")) in sys.path else [BROKEN]

import hunting  # noqa: E402 - found by the line above
import proving  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    command = argparse.ArgumentParser(
        "fsdp-verify museum", description=__doc__, epilog="example: fsdp-verify museum B036 --fuzz", allow_abbrev=False
    )
    command.add_argument(
        "names", nargs="*", metavar="ID", help="bugs such as B036, or planted faults by name; all bugs without"
    )
    command.add_argument("--list", action="store_true", help="print each story and its sources; run nothing")
    command.add_argument(
        "--fuzz", action="store_true", help="hunt each with random cases too, and say how many it took"
    )
    command.add_argument(
        "--exhibits",
        type=count,
        metavar="N",
        help="hunt N bugs, chosen by --seed, with random cases alone; each for at most --seconds",
    )
    command.add_argument("--cases", type=count, default=hunting.RANDOM_CASES, help="most random cases per bug")
    add_seed(command, "of the random cases, and of the choice of --exhibits")
    command.add_argument(
        "--seconds", type=seconds, default=60.0, metavar="N", help="for each of --exhibits (default 60)"
    )
    add_jobs(command, "bugs")
    return command


def main(arguments: Sequence[str]) -> int:
    """Judge, or hunt, and say what escaped.

    Raises:
        InvalidArgument: options that do not go together, or a name that is no fault's.
    """
    options, console = parser().parse_args(arguments), open_console()
    if options.exhibits is not None:
        if options.names or options.list or options.jobs:
            raise InvalidArgument(
                "museum: expected --exhibits N alone, got IDs, --list or --jobs too. Drop one of them."
            )
        return _hunt_drawn(options, console)
    names = proving.chosen(options.names)
    if options.list:
        for name in names:
            _tell(name, console)
        return 0
    room = capacity_here(max(size for _, _, sizes in proving.proofs(map(proving.FAULTS.get, names)) for size in sizes))
    jobs = room.jobs(options.jobs)
    console.say(f"exhibits under way at a time: {room.said(jobs)}")
    escaped = unmet = hunted = 0
    for proof in proving.prove(names, jobs=jobs):
        escaped += not proof.caught
        _print(proof, console)
        if options.fuzz and proving.FAULTS[proof.name].fuzzed:
            hunted += 1
            unmet += not _hunted(proof.name, options, console)
    ending = f"{escaped} of {len(names)} exhibits escaped" if escaped else f"all {len(names)} exhibits are caught"
    console.say(ending, style="bold red" if escaped else "bold green")
    if options.fuzz:
        console.say(f"random cases met {hunted - unmet} of {hunted} exhibits", style="red" if unmet else "green")
    return 1 if escaped or unmet else 0


def _label(name: str) -> str:
    fault = proving.FAULTS[name]
    return f"{fault.bug}  {fault.title}" if fault.bug else name


def _tell(name: str, console: Output) -> None:
    fault = proving.FAULTS[name]
    kind = "silently wrong" if fault.silent else "an error"
    console.say((_label(name), "bold"), f" ({kind}, in {proving.unbroken(fault)})")
    console.say(f"  {fault.story}")
    console.say(f"  caught by {', '.join(fault.checks)}{'; ' if fault.source else ''}{fault.source}", style="dim")


def _print(proof: proving.Proof, console: Output) -> None:
    word = ("caught ", "green") if proof.caught else ("ESCAPED", "bold red")
    console.say(word, f" {_label(proof.name)}  ({proof.seconds:.1f} s)")
    for check in proof.missed:
        console.say(f"         {check} does not fail on it", style="red")
    for check in proof.false_alarms:
        console.say(f"         {check} does not pass without it, so its failure proves nothing", style="red")
    for check in proving.FAULTS[proof.name].checks if proof.caught else ():
        console.say(f"         caught by {check}", style="dim")


def _hunted(name: str, options: argparse.Namespace, console: Output, **limits: float) -> bool:
    """Hunt with random cases and say how many it took; return whether the fault was met."""
    ended = hunting.hunt(name, options.seed, limit=options.cases, **limits)
    word = ("NOT MET", "bold red") if ended.cases is None else ("met    ", "green")
    console.say(word, f" {_label(name)}: {ended.run} random cases, {ended.seconds:.1f} s")
    if ended.sentence:
        console.say(f"         {ended.sentence}", style="dim")
    return ended.cases is not None


def _hunt_drawn(options: argparse.Namespace, console: Output) -> int:
    names = hunting.drawn_bugs(options.exhibits, options.seed)
    met = sum(_hunted(name, options, console, seconds=options.seconds) for name in names)
    console.say(f"{met} of {len(names)} exhibits were met")
    return 0 if met == len(names) else 1
