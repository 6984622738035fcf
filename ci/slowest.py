"""Writes ci/slowest.md: the slowest tests of a run, and what they ran on.

    tox -e cpu -- --junit-xml suite.xml
    python ci/slowest.py suite.xml           # the same environment: its versions are named

Nothing on the page is written by hand. Workflows show the same table beside each run (tests/conftest.py).
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree as ET

PAGE = Path(__file__).parent / "slowest.md"
SHOWN = 50


def table(seconds: Mapping[str, float]) -> list[str]:
    """The slowest tests as a table, setup and teardown included; a bar in a name would end its cell."""
    most = Counter(seconds).most_common(SHOWN)
    rows = [f"| {spent:.1f} | `{name.replace('|', '/')}` |" for name, spent in most]
    return [f"## The {len(rows)} slowest of {len(seconds)} tests", "", "| s | test |", "| --: | --- |", *rows]


def read(text: str) -> tuple[dict[str, float], str, float]:
    """Seconds by test, when the run began, and the seconds of all of it, from a JUnit file that pytest wrote."""
    suite = next(ET.fromstring(text).iter("testsuite"))
    seconds: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        seconds[name] += float(case.get("time", 0))  # type: ignore[assignment]  # a Counter of seconds
    return dict(seconds), suite.get("timestamp", ""), float(suite.get("time", 0))


def page(text: str) -> str:
    """The page of a run on this machine."""
    seconds, began, whole = read(text)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "pytest", "pytest-xdist"))
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# The slowest tests",
        "",
        f"Written by `python ci/slowest.py` from a run of {began[:10]}: {len(seconds)} tests in {whole / 60:.0f} minutes",
        f"on {cores} cores ({platform.machine()}), Python {platform.python_version()}, {versions}.",
        "The tests of one worker of pytest-xdist add up to the whole time; waiting counts. What takes longer than it is",
        "worth is `slow`, and runs nightly (`tox -e slow`).",
        "",
        *table(seconds),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
