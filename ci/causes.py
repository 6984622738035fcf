"""Writes ci/causes.md: which cause is named for each planted fault whose numbers are wrong.

    python ci/causes.py                # ask about every fault, and write the page
    python ci/causes.py PATTERN...     # ask about those (fnmatch), and write their rows only
    python ci/causes.py --count        # ask about none: count the rows of the page

Asked are the faults of tests/quality that break a check by wrong numbers. The cause counts as named if each root cause of
the fault has one: another run of one process that gives the wrong numbers, the terms of a gradient, or what the numbers
are like in every element, also those with which the first wrong module computes. Whether a cause is the right one is for
readers: the page shows it beside what was planted, and `MISLEADING` names those that a reader has found wrong.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_testing.cases.records import Explanation, Finding
from fsdp_testing.checks.conformance import run_conformance
from fsdp_testing.explain.inquiry import WRONG_NUMBERS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ci" / "causes.md"
BROKEN = ROOT / "tests" / "quality" / "broken"
SECONDS = 300.0

MISLEADING: dict[str, str] = {}
"""Causes that are named and wrong, with what is wrong about them."""

_LIKE = re.compile(
    r"\): (the right values.*|zero|.* times the right values.*)$|\): (the right values.*); what is computed before"
)
"""What the numbers are like with which the first wrong module computes, at the end of the sentence about it."""

_NUMBERS_ONLY = ("what is wrong is ", "the first wrong module: ")

_HEAD = """# Causes of planted faults

Made by `python ci/causes.py`. Each fault of `tests/quality` that breaks a check by wrong numbers, what is wrong with it,
and the cause that the explanation names; `-` where it names none.

"""


def cause_of(explanation: Explanation) -> str:
    """Return the cause that an explanation names; empty if none."""
    like = _LIKE.search(explanation.place)
    return explanation.happened or (f"the first wrong module: {like[1] or like[2]}" if like else "")


def ask(name: str, fault: Any) -> str:
    """Return the row of a fault; empty if its findings are not of wrong numbers."""
    (check,) = fault.checks
    report = run_conformance(name, checks=(check,), world_sizes=fault.sizes(check), explain=SECONDS)
    findings = report.results[0].findings
    explained = [finding.shortest for finding in findings if finding.shortest is not None]
    if not explained or not any(map(_of_numbers, findings)):
        return ""
    causes = [cause_of(one) or "-" for one in explained]
    cells = (name.partition(":")[2], fault.story, "; and: ".join(causes))
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"


def _of_numbers(finding: Finding) -> bool:
    """What the comparison with one process found, and no review of something else."""
    return finding.kind in WRONG_NUMBERS and bool(finding.sort)


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of a page by the name of the fault."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| ---"))]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def counted(rows: dict[str, str]) -> str:
    """Return how many causes are named."""
    found, numbers_only = Counter[str](), 0
    for name, row in rows.items():
        causes = row.removesuffix(" |").split(" | ")[2].split("; and: ")
        named = sum(cause != "-" for cause in causes)
        numbers_only += named == len(causes) and all(cause.startswith(_NUMBERS_ONLY) for cause in causes)
        found["wrong" if name in MISLEADING else "named" if named == len(causes) else "some" if named else "none"] += 1
    share = 100 * found["named"] / max(len(rows), 1)
    return (
        f"{len(rows)} faults: all causes named {found['named']} ({share:.0f} %), some {found['some']}, "
        f"none {found['none']}, named wrongly {found['wrong']}. Of those named, {numbers_only} are named by what the "
        "wrong numbers are like alone."
    )


def main(arguments: list[str]) -> None:
    """Ask, print each row, and write the page."""
    rows = rows_of(PAGE.read_text()) if PAGE.exists() else {}
    if arguments != ["--count"]:
        sys.path.insert(0, str(BROKEN))
        faults: dict[str, Any] = import_module("every_fault").FAULTS
        for name, fault in faults.items():
            # Bugs of the field break several checks, some of them by no number; their stories tell the cause.
            if not fault.bug and any(fnmatchcase(name, pattern) for pattern in arguments or ["*"]):
                row = ask(name, fault)
                rows |= {name.partition(":")[2]: row} if row else {}
                print(row or f"{name}: not of numbers", flush=True)
        table = "\n".join(
            ["| fault | what is wrong | cause named |", "| --- | --- | --- |", *(rows[n] for n in sorted(rows))]
        )
        PAGE.write_text(f"{_HEAD}{counted(rows)}\n\n{table}\n")
    print(counted(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
