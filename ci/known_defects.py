"""Writes docs/findings/known-defects.md: which defects of the public record torch shows, and what exposes each of them.

    python ci/known_defects.py            # write the page
    python ci/known_defects.py --run      # run every script and check, and say what is no longer so

The table is docs/findings/known/defects.toml; the page is made from it and from the first line of each script.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.conformance import run_check

FINDINGS = Path(__file__).parent.parent / "docs" / "findings"
TABLE = FINDINGS / "known" / "defects.toml"
PAGE = FINDINGS / "known-defects.md"
SHARED = "ranks"
"""What the scripts import; no script itself."""
LONGEST_S = 180.0

_INTRODUCTION = """# Defects that were known, and what exposes them

Made by `python ci/known_defects.py`. The set was drawn up from torch's issues and pull requests and from those of projects
that build on it, before anything was asked of the checks: whatever torch 2.13.0 shows on the CPU over gloo. A script with
torch alone shows each (exit code 1 and a line; 0 once it is gone; those in `scripts/` end with 0 as long as it shows).
What [the checks themselves found](README.md) is in the set only where the record names it, too. `NAME+capability` is NAME asked
for something that it does not claim, as in [limits.md](limits.md)."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One line of the table.

    Attributes:
        id: Name of its script.
        source: Where it was reported or documented.
        on: Implementation whose check exposes it, maybe with a capability that it does not claim; empty for none.
        check: That check.
        why: Why nothing exposes it.
    """

    id: str
    source: str
    on: str = ""
    check: str = ""
    why: str = ""

    @property
    def script(self) -> Path:
        """Its script, which may be that of a finding."""
        own = FINDINGS / "known" / f"{self.id}.py"
        return own if own.exists() else FINDINGS / "scripts" / f"{self.id}.py"

    @property
    def implementation(self) -> str:
        """What the check is run on, as the registry takes it."""
        return f"fsdp_testing.checks.suites.beyond_claims:{self.on}" if "+" in self.on else self.on

    @property
    def sentence(self) -> str:
        """The first line of its script."""
        text = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or ""
        return text.splitlines()[0]


def read() -> list[Defect]:
    """The table, by name."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["defect"]
    return sorted((Defect(**row) for row in rows), key=lambda one: one.id)


def page(defects: list[Defect]) -> str:
    """The page."""
    exposed = [one for one in defects if one.check]
    share = f"{len(exposed)} of {len(defects)} are exposed ({len(exposed) / len(defects):.0%})."
    lines = [_INTRODUCTION, "", share, "", "| defect | reported | exposed by |", "|---|---|---|"]
    for one in defects:
        how = f"`{one.check}` on {one.on}" if one.check else f"**nothing**: {one.why}"
        lines.append(f"| [{one.sentence}]({one.script.relative_to(FINDINGS)}) | {one.source} | {how} |")
    return "\n".join([*lines, ""])


def shows(defect: Defect) -> str:
    """Run the script; an empty text if it shows the defect, else what it said."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(defect.script)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    due = 1 if defect.script.parent.name == "known" else 0
    return "" if done.returncode == due else f"{defect.id}: the script ended with {done.returncode}: {done.stdout}"


def exposes(defect: Defect) -> str:
    """Run the check; an empty text if it fails, else its verdict."""
    found = run_check(defect.implementation, defect.check, world_sizes=(2,), stop_at_first=True)
    return "" if found.verdict is Verdict.FAIL else f"{defect.id}: {defect.check} on {defect.on}: {found.verdict}"


def wrong(defects: list[Defect]) -> Iterator[str]:
    """What is no longer so."""
    for one in defects:
        yield from filter(None, (shows(one), exposes(one) if one.check else ""))


def main(arguments: list[str]) -> None:
    """Write the page, or run everything."""
    if arguments == ["--run"]:
        found = list(wrong(read()))
        sys.stdout.write("\n".join([*found, ""]))
        raise SystemExit(bool(found))
    PAGE.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
