"""Writes docs/checkpoints-table.md: who loads whose saved state, drawn from what `fsdp-verify checkpoints --json` wrote.

    fsdp-verify checkpoints torch-ddp torch-fsdp1 torch-fsdp2 fsdp_ref-wrapper fsdp_ref-composable --json all.json
    python ci/checkpoints_table.py all.json

Several documents are put together. Every state that does not hold must have a page among the findings, named in `PAGES`; what
has none is listed on the page, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.search.checkpoints.exchange import Result
from fsdp_testing.search.checkpoints.summary import MARKS, SAVED, Summary, worst

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "checkpoints-table.md"
PAGES = {
    r"Missing key in checkpoint state_dict: optimizer\.param_groups\.": "fsdp1-optimizer-directory-empty-shard",
    r"torch function 'data_ptr', with args: \(ShardedTensor\(": "fsdp1-async-save",
    r"AssertionError: Expected device to be set": "dsd-stateless-optimizer",
    r"FSDP assumes .* is in the state_dict": "fsdp1-no-shard-unit-without-gradient",
}
"""What a reason says, and the page of the finding that explains it."""
VERSIONS = ("fsdp-testing", "torch", "python", "processors")


def page_of(result: Result) -> str:
    """Return the page that explains why a state does not hold; empty if none does."""
    saves = not result.loader or not result.reason.startswith(("loading", "further step"))
    if (result.saver if saves else result.loader).startswith("fsdp_ref"):
        return ""  # no page excuses the reference
    return next((page for said, page in PAGES.items() if re.search(said, result.reason)), "")


def document(found: Sequence[Summary]) -> tuple[str, list[Result]]:
    """Return the page, and the results that nothing explains."""
    places = tuple(dict.fromkeys(place for one in found for place in one.places))
    results = tuple({(r.saver, r.loader, r.subject, r.way): r for one in found for r in one.results}.values())
    whole = Summary(found[0].environment, places, results, sum(one.seconds for one in found))
    bad = [result for result in results if result.verdict is not Verdict.PASS]
    open_ = [result for result in bad if not page_of(result)]
    versions = sorted(
        {f"{name} {one.environment[name]}" for one in found for name in VERSIONS if name in one.environment}
    )
    lines = [
        "# Checkpoint compatibility",
        "",
        "Made by `python ci/checkpoints_table.py` from the results of [`fsdp-verify checkpoints`](checkpoints.md), with",
        f"{', '.join(versions)}, {time.strftime('%d %B %Y')}. Subjects and ways that the table lacks were not run.",
        f"{whole.conclusion()}.",
        "",
        *_table(whole),
        "## Refused states",
        "",
        *_explained(bad),
    ]
    if open_:
        lines += ["", "Without an explanation:", ""]
        lines += [f"- `{r.mark}` {r.saver} -> {r.loader or SAVED} ({r.subject}; {r.way}): {r.reason}" for r in open_]
    return "\n".join(lines) + "\n", open_


def _table(whole: Summary) -> list[str]:
    """Return what was combined, and a table with a row for each saver and a letter for each loader."""
    ways: dict[tuple[str, str], list[Result]] = {}
    for result in whole.loaded:
        ways.setdefault((result.subject, result.way), []).append(result)
    numbers = [str(number) for number in range(1, len(whole.places) + 1)]
    width = max(map(len, whole.places)) + 3
    lines = ["| subject | way | loaded states | hold |", "|---|---|---|---|"]
    for (subject, way), results in ways.items():
        held = sum(result.verdict is Verdict.PASS for result in results)
        lines.append(f"| {subject} | {way} | {len(results):,} | {held:,} |")
    lines += [
        "",
        "The row saved and the column with the same number loaded; each cell shows the worst result. " + _legend(),
        "",
        "```text",
    ]
    lines.append(" " * width + "  sv" + "".join(f"{number:>3}" for number in numbers))
    for number, (saver, row) in zip(numbers, whole.cells().items()):
        cells = [row.get(loader, []) for loader in (SAVED, *whole.places)]
        first, *rest = [worst(cell) if cell else "." for cell in cells]
        lines.append(f"{number:>2} {saver:<{width - 3}}   {first}" + "".join(f"{mark:>3}" for mark in rest))
    return [*lines, "```", ""]


def _legend() -> str:
    return ", ".join(f"`{mark}` {said}" for mark, said in MARKS.items()) + ", `.` not run."


def _explained(bad: Sequence[Result]) -> list[str]:
    """Return a line for each finding: how many states it costs, and whose."""
    by_page: dict[str, list[Result]] = {}
    for result in bad:
        if page_of(result):
            by_page.setdefault(page_of(result), []).append(result)
    lines = []
    for page, results in sorted(by_page.items(), key=lambda item: -len(item[1])):
        whose = sorted({(r.loader if r.reason.startswith("loading") else r.saver).split()[0] for r in results})
        lines.append(f"- {len(results):,} states, {', '.join(whose)}: [{page}](findings/{page}.md)")
    return lines or ["Every state holds."]


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("documents", nargs="+", type=Path, metavar="JSON")
    given = options.parse_args()
    found = [Summary.from_json(path.read_text(encoding="utf-8"), str(path)) for path in given.documents]
    text, unexplained = document(found)
    PAGE.write_text(text, encoding="utf-8")
    print(f"written: {PAGE}; {len(unexplained)} states without an explanation")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
