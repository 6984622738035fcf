"""Writes docs/findings/limits.md: what built-in implementations do with what their adapters do not claim.

    python ci/limits.py            # probe everything and write the page (about ten minutes on two cores)
    python ci/limits.py NAME...    # probe these, and print what was found

Every row comes from probes (`fsdp_testing.suites.beyond_claims`): nothing on the page is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from fsdp_testing.implementations import registry
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.records import CAPABILITIES
from fsdp_testing.suites.beyond_claims import Limit, Probed, probe_all

PAGE = Path(__file__).parent.parent / "docs" / "findings" / "limits.md"
COLUMNS = ("torch-ddp", "torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2", "fsdp_ref-wrapper", "fsdp_ref-composable")
MOST = 150
"""Characters of what a probe said."""

Table = dict[str, dict[str, Probed]]


def probed(name: str, table: Table) -> None:
    """Probe one implementation, and note what was found by capability and implementation."""
    for one in probe_all(CaseRunner(), registry.load(name)):
        table.setdefault(one.capability, {})[name] = one
        sys.stdout.write(f"{name:20} {one.capability:26} {one.limit:28} {one.check} {said(one)}\n")
        sys.stdout.flush()


def said(one: Probed) -> str:
    """What a probe said, in one line that is safe in a table."""
    text = " ".join(re.sub(r"0x[0-9a-f]+", "0x...", one.text).split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= MOST else f"{text[:MOST].rsplit(' ', 1)[0]} ..."


def page(table: Table) -> str:
    """The page."""
    lines = [
        "# What implementations do with what their adapters do not claim",
        "",
        "Made by `python ci/limits.py`: each capability that an adapter does not claim is probed by every check that it",
        "alone keeps from the implementation. An error is an honest limit; **silent outside its claims** is a wrong number",
        f"and no word of it. Seen on torch {torch.__version__.partition('+')[0]}, CPU, gloo.",
        "",
        f"| capability | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    rows = [tag for tag in CAPABILITIES if tag in table]
    lines += [
        f"| {CAPABILITIES[tag]} (`{tag}`) | {' | '.join(_cell(table[tag], c) for c in COLUMNS)} |" for tag in rows
    ]
    lines += ["", "## What the probes said", ""]
    for tag in rows:
        for name in COLUMNS:
            one = table[tag].get(name)
            if one is not None and one.text and one.limit is not Limit.WORKS:
                lines.append(f"- `{tag}` on {name}, {one.limit}: `{one.check}`: {said(one)}")
    return "\n".join([*lines, ""])


def _cell(row: dict[str, Probed], column: str) -> str:
    one = row.get(column)
    if one is None:
        return "claimed"
    return f"**{one.limit}**" if one.limit is Limit.SILENT else str(one.limit)


def main(names: list[str]) -> None:
    """Probe, and write the page if everything was probed."""
    table = Table()
    for name in names or COLUMNS:
        probed(name, table)
    if not names:
        PAGE.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
