"""`fsdp-verify doctor`: what is wrong with this machine? Exit code 1 if anything is broken."""

from __future__ import annotations

import argparse

from fsdp_testing.cli.examinations import Condition, Symptom, examine
from fsdp_testing.cli.options import Subparsers

STYLES = {Condition.GOOD: "green", Condition.ODD: "yellow", Condition.BROKEN: "bold red"}


def add(commands: Subparsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    return commands.add_parser(
        "doctor",
        help="what is wrong with this machine",
        description="Look at everything that ranks need: torch, backends, ports, memory, limits, leftover processes.",
        allow_abbrev=False,
    )


def execute(options: argparse.Namespace) -> int:
    """Print one line per examination."""
    from rich.text import Text

    from fsdp_testing.report.terminal import open_console

    del options
    console = open_console()
    found: list[Symptom] = []
    for symptom in examine():
        found.append(symptom)
        word = (f"{symptom.condition.value:<6}", STYLES[symptom.condition])
        console.print(Text.assemble(word, f"  {symptom.name}: {symptom.said}"), soft_wrap=True)
        if symptom.remedy:
            console.print(Text(f"        {symptom.remedy}", style="dim"), soft_wrap=True)
    broken = sum(symptom.condition is Condition.BROKEN for symptom in found)
    console.print(f"{broken} broken" if broken else "nothing broken")
    return 1 if broken else 0
