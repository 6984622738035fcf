"""`fsdp-verify train SCRIPT ARGS...`: does a training script that nobody changed give on N ranks what one process gives?"""

from __future__ import annotations

import argparse
import shlex

from fsdp_testing.cli.options import Command, Subparsers, add_timeout, count, declare, sizes
from fsdp_testing.errors import InvalidArgument

DESCRIPTION = """\
Run an unmodified training script as torchrun would start it, on each number of ranks, and compare it step by step with one
process that sees the rows of all ranks: loss, learning rate, gradients as the optimizer is given them, parameters after.
Options stand before SCRIPT; what follows it is the script's. Dropout is switched off; files that the script writes below the
current folder go to a temporary one.
"""


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "train", "compare a training script on N ranks with one process", DESCRIPTION)
    command.add_argument(
        "--world-sizes",
        type=sizes,
        default=(1, 2, 3),
        metavar="N,N...",
        help="numbers of ranks (default 1,2,3; one always runs)",
    )
    command.add_argument("--steps", type=count, default=10, metavar="K", help="optimizer steps compared (default 10)")
    command.add_argument(
        "--resume-at",
        type=count,
        default=0,
        metavar="K",
        help="also stop before step K (counted from 0), run again where it wrote to, compare with going on",
    )
    command.add_argument(
        "--resume-args",
        default="",
        metavar="ARGS",
        help="further arguments of the script that is run again, in one word",
    )
    command.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="NAME",
        help="a convention by which N ranks are not one process, and that one process is to follow too, so that the rest is "
        "judged; may be repeated: scheduler-per-process (Accelerate's scheduler steps once for each process), "
        "batch-norm-per-rank, loss-per-rank (a router's balance, a contrastive loss)",
    )
    add_timeout(command, 300.0)
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    command.add_argument("script", metavar="SCRIPT")
    command.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return command


def execute(options: argparse.Namespace) -> int:
    """Judge the script: 0 all worlds pass, 1 one differs, 3 of one nothing can be said."""
    from fsdp_testing.records import Verdict
    from fsdp_testing.records.printable import printable
    from fsdp_testing.script_check.check import Launch, examine

    if not options.script:
        raise InvalidArgument("train: expected a script, got none. Name the file that torchrun would start.")
    launch = Launch(
        options.script,
        tuple(options.arguments),
        options.module,
        options.steps,
        options.timeout,
        resume_at=options.resume_at,
        resume_arguments=tuple(shlex.split(options.resume_args)),
        accept=tuple(options.accept),
    )
    report = examine(launch, options.world_sizes)
    print(printable(str(report)))
    return {Verdict.PASS: 0, Verdict.FAIL: 1}.get(report.verdict, 3)
