"""`fsdp-verify museum`: real bugs of the field, which the harness must catch; they are in the tests of a checkout."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

import fsdp_testing
from fsdp_testing.cli.options import Command, Subparsers
from fsdp_testing.errors import InvalidArgument

_TESTS = Path("tests", "quality", "museum.py")


def museum() -> Path:
    """Return the command in the tests of a checkout: the one that this package is in, or the current directory."""
    here = Path(fsdp_testing.__file__).parents[1]
    if not (here / _TESTS).is_file() and Path("fsdp_testing", "cli", "museum.py").is_file():
        here = Path.cwd()
    return here / _TESTS


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command, which passes on all arguments after it."""
    command = commands.add_parser(
        "museum",
        help="plant real bugs that the harness must catch (in a checkout)",
        prefix_chars="+",  # so that all options, including --help, reach the parser of the tests
        add_help=False,
    )
    command.add_argument("arguments", nargs="*")
    return command


def execute(options: argparse.Namespace) -> int:
    """Judge the planted bugs and report those that escaped."""
    return planted_bugs(options.arguments)


def planted_bugs(arguments: Sequence[str]) -> int:
    """Run the command of the checkout's tests: 0 if nothing escaped, 1 if something did.

    Raises:
        InvalidArgument: There is no checkout.
    """
    path = museum()
    if not path.is_file():
        raise InvalidArgument(
            f"museum: expected the tests of a checkout ({path}), got an installed package without them. "
            "The planted bugs belong to the tests: clone the repository, and run `fsdp-verify museum` there."
        )
    try:
        code: int = runpy.run_path(str(path))["main"](arguments)
    except SystemExit as end:  # its parser has already printed its message
        return end.code if isinstance(end.code, int) else 2
    return code
