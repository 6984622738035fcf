"""`fsdp-verify doctor`: what is wrong with this machine, or with a backend. Exit code 1 if anything is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.cli.examinations import Condition, examine
from fsdp_testing.cli.options import Command, Subparsers, declare

if TYPE_CHECKING:
    from fsdp_testing.report.terminal import Output

STYLES = {Condition.GOOD: "green", Condition.ODD: "yellow", Condition.BROKEN: "bold red"}


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands,
        "doctor",
        "check this machine",
        "Check everything that ranks need: torch, backends, ports, memory, limits, leftover processes.",
        example="fsdp-verify doctor\nfsdp-verify doctor --backend nccl",
    )
    text = "run each collective of this backend instead, by dtype and size, and compare with gloo"
    command.add_argument("--backend", metavar="NAME", help=text)
    return command


def execute(options: argparse.Namespace) -> int:
    """Print one line per examination, or a table of collectives by dtype."""
    from fsdp_testing.report.terminal import open_console

    console = open_console()
    if options.backend is not None:
        return _compared(options.backend, console)
    broken = 0
    for name, symptom in examine():
        broken += symptom.condition is Condition.BROKEN
        console.say((f"{symptom.condition.value:<6}", STYLES[symptom.condition]), f"  {name}: {symptom.account}")
        if symptom.remedy:
            console.say(f"        {symptom.remedy}", style="dim")
    console.say(f"{broken} broken" if broken else "nothing broken")
    return 1 if broken else 0


def _compared(name: str, console: Output) -> int:
    """Print the result of each collective of a backend: 0 if all are right, 1 if one is wrong, 3 if nothing was compared."""
    from itertools import groupby

    from fsdp_testing.cli import collectives
    from fsdp_testing.cli.outputs import present
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.sheet import Cell, Line, Row, RowGroup, Sheet, Table

    collectives.check_backend(name)
    answers = []
    with Display(console, "answers") as display:
        display.stage(f"comparing {name} with gloo", len(collectives.COLLECTIVES) * len(collectives.DTYPES))
        for answer in collectives.compared(name):
            answers.append(answer)
            display.at(len(answers))
    rows = tuple(
        Row(what, tuple(Cell(one.word, "fail" if one.word in collectives.BAD else "") for one in row))
        for what, row in groupby(answers, lambda one: one.collective)
    )
    whys = dict.fromkeys(f"{one.collective}, {one.dtype}: {one.word}: {one.why}" for one in answers if one.why)
    wrong = sum(one.word in collectives.BAD for one in answers)
    equal = sum(one.word == collectives.EQUAL for one in answers)
    code = 1 if wrong else 0 if equal else 3
    table = Table("collective", collectives.DTYPES, (RowGroup(rows),))
    counts = f"{name}: {equal} of {len(answers)} equal to gloo at {len(collectives.SIZES)} sizes, {wrong} wrong or lost"
    return present(Sheet(name, code, counts, lead=(table, *map(Line, whys))), console, {}, {})
