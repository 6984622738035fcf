"""Makes the tables of known failures in the documentation from the one list of them.

    python ci/known_defects.py            # write the pages
    python ci/known_defects.py --run      # run every script and check of what was known before, and say what is no longer so

The list is fsdp_testing/checks/findings/known_failures.toml. Text around the tables is written by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.checks.conformance import run_check
from fsdp_testing.checks.findings.known import Defect, shipped
from fsdp_testing.judging.tags import tokens

ROOT = Path(__file__).parent.parent
FINDINGS = ROOT / "docs" / "findings"
LONGEST_S = 180.0
BEGIN, END = "<!-- begin: python ci/known_defects.py -->", "<!-- end -->"


def script_of(defect: Defect) -> Path | None:
    """The script with torch alone that shows a defect."""
    if defect.place.endswith(".py"):
        return ROOT / defect.place
    return FINDINGS / "scripts" / f"{defect.name}.py" if defect.place.endswith(".md") else None


def checks_of(defect: Defect) -> list[str]:
    """The checks that fail because of a defect."""
    return list(dict.fromkeys([*(check for entry in defect.expected for check in entry.checks), *defect.shown[:1]]))


def on_of(defect: Defect) -> list[str]:
    """The implementations whose checks are expected to fail because of a defect."""
    return [name for entry in defect.expected for name in entry.on]


def known_before(defects: Iterable[Defect]) -> list[Defect]:
    """The defects that the public record names, by name."""
    return sorted((defect for defect in defects if defect.reported), key=lambda defect: defect.name)


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table whose columns are named in a line."""
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def findings(defects: Iterable[Defect]) -> str:
    """What was found, with a page each."""
    rows = []
    for defect in defects:
        if defect.place.endswith(".md"):
            names = ", ".join(f"`{check}`" for check in checks_of(defect))
            beside = defect.expected and all(name.endswith(".tensor_parallel") for name in on_of(defect))
            found = names + ", with `--tensor-parallel 2`" * bool(beside)
            found = found or f"none; found by {defect.found or 'the fuzzer'}"
            rows.append((f"[{defect.reason}]({defect.name}.md)", defect.affects, defect.effect, found))
    return table("finding | implementations | kind | checks that fail", rows)


def exposures(defects: Iterable[Defect]) -> str:
    """What was known before, and what exposes it."""
    known = known_before(defects)
    shown = [defect for defect in known if defect.shown]
    rows = []
    for defect in known:
        how = "`{}` on {}".format(*defect.shown) if defect.shown else f"**nothing**: {defect.not_shown}"
        script = script_of(defect)
        assert script is not None
        rows.append((f"[{defect.reason}]({script.relative_to(FINDINGS)})", defect.reported, how))
    share = f"{len(shown)} of {len(known)} are exposed ({len(shown) / len(known):.0%})."
    return share + "\n\n" + table("defect | reported | exposed by", rows)


def programs(defects: Iterable[Defect]) -> str:
    """The shortest program that shows each defect of which the fuzzer has rules."""
    rows = []
    for defect in defects:
        cases = [Case.from_json(rule.example, rule.name) for rule in defect.rules if rule.example]
        if not cases:
            continue
        program = min(map(tokens, cases), key=len)
        links = [f"[described]({defect.place.removeprefix('docs/')})"] if defect.place else []
        links += [f"[reported]({defect.issue})"] if defect.issue else []
        names = ", ".join(f"`{name}`" for name in defect.implementations)
        rows.append((", ".join(program) or "wrapping", names, defect.reason, ", ".join(links)))
    return table("program | implementations | what happens | where", rows)


PAGES = {
    FINDINGS / "README.md": findings,
    FINDINGS / "known-defects.md": exposures,
    ROOT / "docs" / "found-by-fuzzing.md": programs,
}


def page(path: Path, defects: Iterable[Defect]) -> str:
    """The text of a page with its table as the list has it."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{PAGES[path](defects)}\n{END}{rest.partition(END)[2]}"


def shows(defect: Defect) -> str:
    """Run the script; an empty text if it shows the defect, else what it said."""
    script = script_of(defect)
    assert script is not None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    due = 1 if script.parent.name == "known" else 0
    return "" if done.returncode == due else f"{defect.name}: the script ended with {done.returncode}: {done.stdout}"


def exposes(defect: Defect) -> str:
    """Run the check; an empty text if it fails, else its verdict."""
    check, on = defect.shown
    found = run_check(implementation(on), check, world_sizes=(2,), stop_at_first=True)
    return "" if found.verdict is Verdict.FAIL else f"{defect.name}: {check} on {on}: {found.verdict}"


def implementation(on: str) -> str:
    """What a check is run on, as the registry takes it."""
    return f"fsdp_testing.checks.suites.beyond_claims:{on}" if "+" in on else on


def wrong(defects: Iterable[Defect]) -> Iterator[str]:
    """What is no longer so."""
    for defect in defects:
        yield from filter(None, (shows(defect), exposes(defect) if defect.shown else ""))


def main(arguments: list[str]) -> None:
    """Write the pages, or run everything."""
    if arguments == ["--run"]:
        lines = list(wrong(known_before(shipped())))
        sys.stdout.write("\n".join([*lines, ""]))
        raise SystemExit(bool(lines))
    for path in PAGES:
        path.write_text(page(path, shipped()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
