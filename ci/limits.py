"""Writes docs/findings/limits.md: what built-in implementations do with what their adapters do not claim.

    python ci/limits.py                      # probe everything (an hour on two cores)
    python ci/limits.py NAME [CAPABILITY...] # probe one implementation, or these capabilities of it
    python ci/limits.py --page               # write the page of what was found so far

Every row comes from probes (`fsdp_testing.checks.suites.beyond_claims`): nothing on the page is written by hand. What was found
is kept in docs/findings/limits.json, so that one implementation can be probed anew without the others.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.checks.suites.beyond_claims import Limit, Probed, probe
from fsdp_testing.judging.case_runner import CaseRunner

PAGE = Path(__file__).parent.parent / "docs" / "findings" / "limits.md"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
FOUND = PAGE.with_suffix(".json")
COLUMNS = ("torch-ddp", "torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2", "fsdp_ref-wrapper", "fsdp_ref-composable")
MOST = 150
"""Characters of what a probe said."""

Table = dict[str, dict[str, Probed]]


def read() -> Table:
    """What was found so far."""
    kept = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    return {
        tag: {name: Probed(tag, Limit(limit), check, text) for name, (limit, check, text) in row.items()}
        for tag, row in kept.items()
    }


def write(table: Table) -> None:
    """Keep what was found, and make the page of it."""
    kept = {tag: {name: [one.limit, one.check, said(one)] for name, one in row.items()} for tag, row in table.items()}
    FOUND.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(table), encoding="utf-8")


def probe_one(name: str, capabilities: list[str]) -> None:
    """Probe an implementation; what it claims by now is forgotten."""
    runner, adapter = CaseRunner(), registry.load(name)
    for tag in capabilities:
        found = None if tag in adapter.capabilities else probe(runner, adapter, tag)
        table = read()
        row = table.setdefault(tag, {})
        row.pop(name, None)
        if found is not None:
            row[name] = found
            sys.stdout.write(f"{name:20} {tag:26} {found.limit:28} {found.check} {said(found)}\n")
            sys.stdout.flush()
        write(table)


def said(one: Probed) -> str:
    """What a probe said, in one line that is safe in a table."""
    text = " ".join(re.sub(r"0x[0-9a-f]+", "0x...", one.text).split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= MOST else f"{text[:MOST].rsplit(' ', 1)[0]} ..."


def pinned_torch() -> str:
    """The release whose limits are on the page."""
    return str(re.findall(r"^torch==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)[0])


def page(table: Table) -> str:
    """The page, with the claims of the torch that is installed."""
    lines = [
        "# Limits: features without a claim",
        "",
        "Made by `python ci/limits.py`: each capability that an adapter does not claim is probed by every check that it",
        "alone keeps from the implementation. An error is an honest limit; **silent outside its claims** means a wrong number",
        f"without an error. Seen on torch {pinned_torch()}, CPU, gloo.",
        "",
        f"| capability | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    claims = {name: registry.load(name).capabilities for name in COLUMNS}
    rows = [tag for tag in CAPABILITIES if any(tag not in claimed for claimed in claims.values())]
    for tag in rows:
        cells = ["claimed" if tag in claims[name] else _cell(table.get(tag, {}).get(name)) for name in COLUMNS]
        lines.append(f"| {CAPABILITIES[tag]} (`{tag}`) | {' | '.join(cells)} |")
    lines += ["", "## Silent, or a hang", "", "`limits.json` has the result of every probe.", ""]
    for tag in rows:
        for name in COLUMNS:
            one = table.get(tag, {}).get(name)
            if one is not None and one.limit in (Limit.SILENT, Limit.HANGS):
                lines.append(f"- `{tag}` on {name}: `{one.check}`: {said(one)}")
    return "\n".join([*lines, ""])


def _cell(one: Probed | None) -> str:
    if one is None:
        return "not probed"
    return f"**{one.limit}**" if one.limit is Limit.SILENT else str(one.limit)


def main(arguments: list[str]) -> None:
    """Probe, and write the page."""
    if arguments == ["--page"]:
        write(read())
        return
    for name in arguments[:1] or COLUMNS:
        probe_one(name, arguments[1:] or list(CAPABILITIES))


if __name__ == "__main__":
    main(sys.argv[1:])
