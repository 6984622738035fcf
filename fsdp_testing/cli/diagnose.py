"""`fsdp-verify diagnose DUMP...`: who waits for whom, from the dumps of torch's flight recorder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, count, declare, path_of
from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present

if TYPE_CHECKING:
    from fsdp_testing.ranks.dumps import Diagnosis
    from fsdp_testing.report.sheet import Sheet

DESCRIPTION = """\
Read the dumps of torch's flight recorder from a training that hangs, one per rank, and say which rank waits for which, in
which collective, on which line, and how late each rank is. Nothing in a dump is executed. A file's name ends with its rank,
as in nccl_trace_rank_0.

Exit code: 0 nothing is wrong in them, 1 ranks disagree, wait for others or left no dump, 3 no verdict.
"""
EXAMPLE = "fsdp-verify diagnose nccl_trace_rank_* --json diagnosis.json"
_CONCLUSIONS = {
    0: "nothing is wrong in the dumps",
    1: "ranks disagree, wait for others, or left no dump",
    3: "no verdict: the dumps do not tell",
}


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    summary = "find which rank waits for which in dumps of torch's flight recorder"
    command = declare(commands, "diagnose", summary, DESCRIPTION, example=EXAMPLE)
    command.add_argument(
        "dumps", nargs="+", type=path_of, metavar="DUMP", help="a dump, or a folder that holds nothing else"
    )
    command.add_argument("--world-size", type=count, metavar="N", help="number of ranks (default: as the dumps say)")
    add_html(command)
    add_json(command, "the diagnosis")
    return command


def execute(options: argparse.Namespace) -> int:
    """Read the dumps, print the diagnosis, and return the exit code."""
    from fsdp_testing.base.document import Format
    from fsdp_testing.ranks.dumps import diagnose, read_dumps
    from fsdp_testing.report.terminal import open_console

    paths = checked_outputs(options)
    diagnosis = diagnose(read_dumps(options.dumps), options.world_size)
    document = Format("fsdp_testing/diagnosis", 1)
    return present(
        _sheet(diagnosis), open_console(), paths, {"--json": lambda: document.write(diagnosis, indent=1) + "\n"}
    )


def _sheet(diagnosis: Diagnosis) -> Sheet:
    from fsdp_testing.report.sheet import Cell, Row, RowGroup, Section, Sheet, Table, bulleted

    rows = tuple(
        Row(
            f"rank {rank.rank}",
            tuple(map(Cell, (str(rank.compared), f"{rank.mean:.3f}", f"{rank.most:.3f}", rank.where, rank.last))),
        )
        for rank in diagnosis.ranks
    )
    columns = ("compared", "mean s", "most s", "where", "last issued")
    table = Table("how late each rank is, by its host's clock", columns, (RowGroup(rows),))
    return Sheet(
        title="diagnose",
        exit_code=diagnosis.exit_code,
        conclusion=_CONCLUSIONS[diagnosis.exit_code],
        sections=(Section("", (bulleted(diagnosis.sentences),)), Section("", (table,))),
        subject="dumps of torch's flight recorder",
    )
