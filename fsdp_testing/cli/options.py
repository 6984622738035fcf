"""Options that several commands share: one spelling for each, and the old ones for one more version.

`--timeout`: seconds until a rank counts as hung. `--jobs`: how many run at a time. `--seed`: determines all random choices.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.judging.worlds import Capacity
    from fsdp_testing.ranks.faults.fault import Fault

Subparsers = argparse._SubParsersAction  # the only name argparse gives it
Command = argparse.ArgumentParser


def declare(
    commands: Subparsers[Command], name: str, summary: str, description: str, *, example: str, epilog: str = ""
) -> Command:
    """Declare a command: its name and its help, in paragraphs as wide as the terminal; examples keep their lines."""
    width = max(shutil.get_terminal_size().columns - 2, 20)  # as argparse does for options

    def filled(text: str) -> str:
        return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))

    return commands.add_parser(
        name,
        help=summary,
        description=filled(description),
        epilog="\n  ".join(["example:", *example.splitlines()]) + (f"\n\n{filled(epilog)}" if epilog else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")


def allowance(text: str) -> float:
    """Parse a finite number of seconds that may be zero."""
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, got {text!r}")


def path_of(text: str) -> Path:
    """Parse the path of a file or a folder; an empty one would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}. The current folder is `.`")
    return Path(text)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")


def sizes(text: str) -> tuple[int, ...]:
    """Parse world sizes as the user writes them: `2` or `2,3`; each once, in the order given."""
    with suppress(ValueError):
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
        if min(numbers) >= 1:
            return numbers
    raise argparse.ArgumentTypeError(f"expected sizes of at least 1, such as 2 or 2,3, got {text!r}")


def part(text: str) -> tuple[int, int]:
    """Parse a part, `I/N`."""
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, such as 2/8, got {text!r}")
    return int(first), int(of)


def add_timeout(group: argparse._ActionsContainer, default: float) -> argparse.Action:
    """Declare `--timeout`."""
    text = f"until a rank counts as hung (default {default:g})"
    return group.add_argument("--timeout", type=seconds, default=default, metavar="SECONDS", help=text)


def add_world_sizes(group: argparse._ActionsContainer, text: str, default: tuple[int, ...] = ()) -> argparse.Action:
    """Declare `--world-size`, which takes one or several."""
    return group.add_argument("--world-size", type=sizes, default=default, metavar="N[,N...]", help=text)


def add_tensor_parallel(group: argparse._ActionsContainer) -> argparse.Action:
    """Declare `--tensor-parallel`."""
    text = "ranks that share one model by torch's tensor parallelism (default 1)"
    return group.add_argument("--tensor-parallel", type=count, default=1, metavar="T", help=text)


def fault(text: str) -> Fault:
    """Parse a fault to inject."""
    from fsdp_testing.ranks.faults.fault import Fault

    try:
        return Fault.parse(text)
    except InvalidArgument as wrong:
        raise argparse.ArgumentTypeError(str(wrong).removeprefix("fault: ").removesuffix(".")) from None


def add_fault(option: Callable[..., argparse.Action], where: str) -> argparse.Action:
    """Declare `--fault`."""
    text = f"inject a fault {where}, as crash@rank=1,step=3 or delay=2.5@rank=1,collective=7; may be repeated"
    return option("--fault", type=fault, action="append", default=[], metavar="FAULT", help=text)


def add_jobs(group: argparse._ActionsContainer, what: str) -> argparse.Action:
    """Declare `--jobs`: how many `what` run at a time."""
    text = f"{what} at a time (default: by processors and room)"
    return group.add_argument("--jobs", type=count, metavar="N", help=text)


def capacity_here(largest: int) -> Capacity:
    """Return how many jobs fit on the hosts of the ranks, each with a world of `largest` ranks."""
    from fsdp_testing.judging.worlds import capacity
    from fsdp_testing.ranks.pool import default_pool

    hosts = default_pool().hosts
    return capacity(largest, hosts.processors if hosts is not None else None)


def add_seed(group: argparse._ActionsContainer, text: str) -> argparse.Action:
    """Declare `--seed`."""
    return group.add_argument("--seed", type=int, default=0, metavar="S", help=f"{text} (default 0)")


def add_old_spelling(group: argparse._ActionsContainer, old: str, action: argparse.Action) -> None:
    """Also accept `old` for the option of `action`, for one version: with a warning, and hidden from the help."""
    parse: Any = action.type

    def renamed(text: str) -> Any:
        value = parse(text)
        warn_old_spelling(old, action.option_strings[-1])
        return value

    group.add_argument(old, dest=action.dest, type=renamed, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def warn_old_spelling(old: str, new: str) -> None:
    """Say on standard error that `old` is called `new` now."""
    print(f"fsdp-verify: {old} is called {new} now; the next version will not know the old name", file=sys.stderr)
