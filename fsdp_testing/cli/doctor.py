"""`fsdp-verify doctor`: what is wrong with this machine. Exit code 1 if anything is broken."""

from __future__ import annotations

import argparse

from fsdp_testing.cli.examinations import Condition, examine
from fsdp_testing.cli.options import Command, Subparsers, declare

STYLES = {Condition.GOOD: "green", Condition.ODD: "yellow", Condition.BROKEN: "bold red"}


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    return declare(
        commands,
        "doctor",
        "what is wrong with this machine",
        "Look at everything that ranks need: torch, backends, ports, memory, limits, leftover processes.",
    )


def execute(options: argparse.Namespace) -> int:
    """Print one line per examination."""
    from fsdp_testing.report.terminal import open_console

    del options
    console = open_console()
    broken = 0
    for name, symptom in examine():
        broken += symptom.condition is Condition.BROKEN
        console.say((f"{symptom.condition.value:<6}", STYLES[symptom.condition]), f"  {name}: {symptom.account}")
        if symptom.remedy:
            console.say(f"        {symptom.remedy}", style="dim")
    console.say(f"{broken} broken" if broken else "nothing broken")
    return 1 if broken else 0
