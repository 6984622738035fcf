"""`fsdp-verify merge REPORT...`: what do the parts of a run say together?"""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_testing.cli.options import Command, Subparsers, declare
from fsdp_testing.cli.run import add_outputs, outputs, present
from fsdp_testing.errors import InvalidArgument

DESCRIPTION = """\
Put the JSON reports of `fsdp-verify run ... --shard 1/N` to `N/N` together: the report, and the exit code, of one run.
Parts that are missing, there twice, or of different runs are refused.
"""


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "merge", "put the reports of a divided run together", DESCRIPTION)
    command.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="what `run --shard --json` wrote")
    add_outputs(command)
    return command


def execute(options: argparse.Namespace) -> int:
    """Read, merge, print, write."""
    from fsdp_testing.records import RunReport
    from fsdp_testing.report import check_writable
    from fsdp_testing.report.merging import merged
    from fsdp_testing.report.terminal import open_console

    for option, path in outputs(options).items():
        check_writable(path, option)
    repeated = sorted({str(path) for path in options.reports if options.reports.count(path) > 1})
    if repeated:
        raise InvalidArgument(f"merge: expected each report once, got {', '.join(repeated)} more than once. Drop one.")
    reports = {}
    for path in options.reports:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"merge: expected a report, got {str(path)!r} ({error}). Give what `--json` wrote."
            ) from error
        reports[str(path)] = RunReport.from_json(text, str(path))
    return present(merged(reports), options, open_console())
