"""`fsdp-verify train SCRIPT ARGS...`: an unmodified training script on N ranks, against one process."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from fsdp_testing.cli.options import Command, Subparsers, add_fault, add_timeout, count, declare, sizes
from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.ranks.pool import WorldOutcome
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.terminal import Output

DESCRIPTION = """\
Run an unmodified training script as torchrun would start it, on each number of ranks, and compare it step by step with one
process that sees the rows of all ranks: loss, learning rate, gradients as the optimizer receives them, parameters after the
step. Put options before SCRIPT; arguments after it go to the script. Dropout is switched off; files that the script writes
below the current folder go to a temporary one.
"""
EXAMPLE = """\
fsdp-verify train --world-sizes 1,2 train.py --epochs 1
fsdp-verify train --vary k=1,2 train.py --accumulate {k} --batch {8/k}
"""
_ARGUMENTS, _VARY = "--resume-args", "--vary"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands, "train", "compare a training script on N ranks with one process", DESCRIPTION, example=EXAMPLE
    )
    option = command.add_argument
    valued = [
        option(
            "--world-sizes",
            type=sizes,
            default=(1, 2, 3),
            metavar="N,N...",
            help="numbers of ranks (default 1,2,3; one always runs)",
        ),
        option("--steps", type=count, default=10, metavar="K", help="optimizer steps compared (default 10)"),
        *_add_relations(option),
        option(
            "--accept",
            action="append",
            default=[],
            metavar="NAME",
            help="an intended convention; one process follows it too, and the rest is judged; repeatable: "
            "scheduler-per-process (of Accelerate), batch-norm-per-rank, loss-per-rank (a router's balance, a contrastive loss), "
            "measured-gradients (backward passes that are cleared before the step do not count)",
        ),
        add_timeout(command, 300.0),
        add_html(command),
        add_json(command, "the report"),
    ]
    option(
        "--streams",
        action="store_true",
        help="also record streams on each number of ranks: a race fails",
    )
    option("--show-output", action="store_true", help="print the script's output after each run")
    option("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    option("script", metavar="SCRIPT")
    option("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    names = {name for action in valued for name in action.option_strings}
    command.set_defaults(own_options={*names, "--streams", "--show-output"})
    parse = command.parse_known_args

    def parse_attached(args: Any = None, namespace: Any = None) -> Any:
        return parse(_attached(args, names), namespace)

    command.parse_known_args = parse_attached  # type: ignore[method-assign]  # the one place before words are sorted
    return command


def _add_relations(option: Callable[..., argparse.Action]) -> list[argparse.Action]:
    """Declare the changes, besides the number of ranks, that must not matter; each option has a value."""
    return [
        option(
            "--resume-at",
            type=count,
            default=0,
            metavar="K",
            help="also stop before step K (from 0), resume, and compare with the uninterrupted run",
        ),
        option(
            _ARGUMENTS,
            default="",
            metavar="ARGS",
            help="further arguments for the resumed run, as one quoted word",
        ),
        add_fault(option, "in one more run"),
        option(
            _VARY,
            type=_words,
            action="append",
            default=[],
            metavar="RELATION",
            help="a change that must not matter; repeatable. NAME=V,V...: values for {NAME} or {8/NAME} in the "
            "script's arguments, as "
            'k=1,2,4 for `--accumulate {k} --batch {8/k}`. Two texts of arguments, as "" "--compile". order: of rows in a '
            "batch. padding: columns that collate_fn adds",
        ),
        option(
            "--against",
            action="append",
            default=[],
            metavar="ENV|COMMIT",
            help="compare with the script run by another environment (its folder or interpreter), or with a commit of its "
            "repository",
        ),
    ]


def _attached(words: Sequence[str], valued: Container[str]) -> list[str]:
    """Return the words with the values of --resume-args and --vary attached by `=`: argparse takes `--x=y` for an option.

    Args:
        words: Options, script and its arguments.
        valued: Options that take a value.
    """
    found = list(words)
    place = 0
    while place + 1 < len(found) and found[place].startswith("-"):
        word = found[place]
        attaches = word in (_ARGUMENTS, _VARY)
        if word == _ARGUMENTS:
            found[place : place + 2] = [f"{word}={found[place + 1]}"]
        elif word == _VARY:
            end = place + (3 if found[place + 1][:1] in ("", "-") else 2)  # texts of arguments are two
            found[place:end] = [f"{word}={json.dumps(found[place + 1 : end])}"]
        place += 2 if word in valued and not attaches else 1
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text.startswith("[") else (text,)


def execute(options: argparse.Namespace) -> int:
    """Judge the script: 0 all worlds pass, 1 one differs, 3 one has no verdict."""
    from fsdp_testing.checks.conformance import environment
    from fsdp_testing.report.progress import Display
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.train.report import training_sheet
    from fsdp_testing.train.script import Launch, examine

    if not options.script:
        raise InvalidArgument("train: expected a script, got none. Name the file that torchrun would start.")
    paths = checked_outputs(options)
    launch = Launch(
        options.script,
        tuple(options.arguments),
        options.module,
        options.steps,
        options.timeout,
        resume_at=options.resume_at,
        resume_arguments=tuple(shlex.split(options.resume_args)),
        accept=tuple(options.accept),
        vary=tuple(options.vary),
        streams=options.streams,
        against=tuple(options.against),
        faults=tuple(options.fault),
    )
    console, began = open_console(), time.monotonic()
    if late := [word for word in options.arguments if word.partition("=")[0] in options.own_options]:
        console.say(f"note: {', '.join(late)} after SCRIPT is the script's. Put options of fsdp-verify before SCRIPT.")
    with Display(console) as display:
        report = examine(launch, options.world_sizes, listener=_Listener(display, console, shows=options.show_output))
    facts: dict[str, Any] = {
        "arguments": options.arguments,
        "steps": options.steps,
        "world_sizes": options.world_sizes,
        "vary": options.vary,
        "against": options.against,
        "streams": options.streams,
        "faults": [str(fault) for fault in options.fault],
        "seconds": time.monotonic() - began,
        "environment": environment(),
    }
    sheet = training_sheet(report, **facts)
    return present(sheet, console, paths, {"--json": lambda: report.to_json(**facts)}, full=True)


class _Listener:
    """Shows which run of the script is under way, and its output if requested."""

    def __init__(self, progress: Display, console: Output, *, shows: bool) -> None:
        self._progress, self._console, self._shows = progress, console, shows
        self._begun: set[str] = set()

    def started(self, what: str) -> None:
        self._progress.stage(f"{what}, again" if what in self._begun else what)
        self._begun.add(what)

    def ended(self, what: str, seconds: float, outcome: WorldOutcome) -> None:
        if not self._shows:
            return
        self._console.say(f"--- {what} ({seconds:.1f} s)", style="bold")
        for rank in outcome.ranks:
            for stream, text in (("", rank.stdout), (" (stderr)", rank.stderr)):
                for line in text.splitlines():
                    self._console.say(f"rank {rank.rank}{stream}: {line}")
