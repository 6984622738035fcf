"""The command line: its commands, and the exit code of each.

0: all claims hold. 1: a check failed. 2: bad usage or a bad adapter. 3: a verdict is unknown, including a failure of the
    harness itself. 130: interrupted. An error that you can fix is one message on standard error, without a traceback.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from fsdp_testing.base import env, extras
from fsdp_testing.base.printable import one_sentence, printable
from fsdp_testing.cli import (
    certify,
    checkpoints,
    diagnose,
    doctor,
    fuzz,
    list_command,
    merge,
    museum,
    new_adapter,
    parity,
    plan,
    replay,
    run,
    train,
)
from fsdp_testing.errors import HarnessError, InvalidArgument, InvalidRecord, PoolBroken

PROGRAM = "fsdp-verify"
COMMANDS: tuple[ModuleType, ...] = (
    run,
    merge,
    train,
    fuzz,
    certify,
    checkpoints,
    replay,
    diagnose,
    parity,
    museum,
    new_adapter,
    list_command,
    plan,
    doctor,
)
# Commands that use the processes of a launcher, and one that each process may run on its own.
_ON_RANKS = ("run", "train", "fuzz", "certify", "checkpoints", "parity")
_ALONE = ("doctor",)
BAD_USAGE = 2
UNKNOWN = 3
INTERRUPTED = 130

EPILOG = """\
exit codes:
  0  all claims that were checked hold
  1  a check failed
  2  bad usage or a bad adapter
  3  a verdict is unknown (never counted as a pass)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: The arguments after the program's name; `None` takes them from the command line.
    """
    if arguments is None:
        # Before it ends Python collects garbage several times: a third of a second once torch is imported. It also finalises
        # objects, such as files with unflushed text, so only a process of our own may skip this.
        atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        # Names, paths and messages may hold characters that the terminal's encoding lacks: escape them instead of failing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = parser().parse_args(arguments)
    except SystemExit as end:  # argparse has already printed its message
        return end.code if isinstance(end.code, int) else BAD_USAGE
    # Import strings name modules of the user's own project, as `python -m` would find them.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        with extras.needed():
            code = _execute(options)
        sys.stdout.flush()
    except PoolBroken as error:
        return _say(error, UNKNOWN)
    except (InvalidRecord, InvalidArgument) as error:
        return _say(one_sentence(str(error)), BAD_USAGE)
    except HarnessError as error:
        return _say(error, BAD_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has ended (`| head`); Python must not complain again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN
    return code


def _execute(options: argparse.Namespace) -> int:
    """Run the command; under a launcher the first process runs it, and the others serve it ranks."""
    code: int
    launch = env.launched()
    if launch is None or launch.world_size == 1 or options.command in _ALONE:
        code = options.execute(options)
        return code
    if options.command not in _ON_RANKS:
        if launch.rank:
            return BAD_USAGE  # the first process says why
        raise InvalidArgument(
            f"{options.command}: expected one process, got one of {launch.world_size} that {launch.launcher} started. "
            f"Start it without {launch.launcher}; {', '.join(_ON_RANKS)} use its processes."
        )
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.ranks.pool.serving import gathered, serve

    if launch.rank:
        serve(launch, default_pool())
        return 0
    with gathered(launch, default_pool()) as hosts:
        print(printable(hosts.describe()), flush=True)
        code = options.execute(options)
    return code


class _OneSentence(argparse.ArgumentParser):
    """Reports wrong arguments in one line, without a page of usage before it; commands inherit this."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: error: {message}. `{self.prog} --help` says what it takes.\n")


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    top = _OneSentence(
        prog=PROGRAM,
        description="Prove that a data-parallel sharding implementation computes what one process would compute.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        command = module.add(commands)
        command.set_defaults(execute=module.execute, command=command.prog.split()[-1])
    return top


def _version() -> str:
    from importlib import metadata

    return f"{PROGRAM} {metadata.version('fsdp-testing')}"


def _say(error: object, code: int) -> int:
    sys.stdout.flush()
    print(f"{PROGRAM}: {printable(str(error))}", file=sys.stderr)
    return code
