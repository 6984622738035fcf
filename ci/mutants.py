"""Runs mutmut over the layout, then compares the survivors with those explained.

    python ci/mutants.py [--jobs N] [--no-run]

mutmut's own settings are in pyproject.toml. It continues where it stopped; `mutants/` holds what it has made, and may be
deleted at any time. Exit code: 0 all survivors are explained, 1 some are not, a mutant was not tried, or an explanation fits
nothing any more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

EXPLAINED = Path(__file__).with_name("mutants-explained.toml")
_CAUGHT = ("killed", "timeout", "caught by type check")
_UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A change that no test noticed: the function, the line before and after."""

    function: str
    removed: str
    added: str


def mutmut(*arguments: str) -> str:
    """What a command of mutmut prints."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def statuses() -> dict[str, str]:
    """Status of each mutant by name."""
    lines = (line.strip().rsplit(": ", 1) for line in mutmut("results", "--all", "true").splitlines())
    return {parts[0]: parts[1] for parts in lines if len(parts) == 2}


def survivor(name: str) -> Survivor:
    """What the mutant changes, without its number: numbers shift when a function is edited."""
    changes = [
        line for line in mutmut("show", name).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    function = name.rpartition("__mutmut_")[0].replace("xǁ", "").replace("ǁ", ".").replace(".x_", ".")
    texts = {sign: " ".join(line[1:].strip() for line in changes if line[0] == sign) for sign in "-+"}
    return Survivor(function, texts["-"], texts["+"])


def explanations() -> dict[Survivor, str]:
    """Why each known survivor is no gap in the tests."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivor", [])
    return {Survivor(entry["function"], entry["removed"], entry["added"]): entry["why"] for entry in entries}


def main() -> int:
    """Run, count, compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="tests of so many mutants side by side (default: 2)")
    parser.add_argument("--no-run", action="store_true", help="only judge what an earlier run left")
    chosen = parser.parse_args()
    if not chosen.no_run:
        subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", str(chosen.jobs)], check=True)
    found = statuses()
    counts = Counter(found.values())
    known = explanations()
    left = {survivor(name): name for name, status in found.items() if status not in (*_CAUGHT, _UNCHECKED)}
    open_ones = {each: name for each, name in left.items() if each not in known}
    stale = [each for each in known if each not in left]
    judged = len(found) - counts[_UNCHECKED] - sum(each in known for each in left)
    caught = sum(counts[status] for status in _CAUGHT)
    print(f"{len(found)} mutants: {', '.join(f'{number} {status}' for status, number in counts.most_common())}")
    print(f"{caught} of {judged} that change what the code does were caught: {100 * caught / max(1, judged):.1f} %")
    for each, name in open_ones.items():
        print(f"not noticed: {each.function}\n  - {each.removed}\n  + {each.added}\n  ({name}, {found[name]})")
    for each in stale:
        print(f"explained, but not there any more: {each.function}\n  - {each.removed}\n  + {each.added}")
    return 1 if open_ones or stale or counts[_UNCHECKED] else 0


if __name__ == "__main__":
    sys.exit(main())
