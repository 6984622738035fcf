"""Drives real pytest, in a process of its own, over small projects that use the plugin.

`run_folder` starts a new process; what else runs sessions forks them from one that has imported torch (tests/sessions).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

HEADER = """
import os, signal, sys, threading, time
import pytest
"""
TORCH = """
import torch
import torch.distributed as dist
"""
NEXT = """
@pytest.mark.world(2)
def test_next(world):
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run of pytest printed, and how it counted."""

    text: str
    passed: int
    failed: int
    skipped: int
    errors: int
    xfailed: int
    warnings: int
    code: int

    def counts(self) -> tuple[int, int, int]:
        """Passed, failed, errors."""
        return self.passed, self.failed, self.errors


Runner = Callable[..., Verdict]


def read(text: str, code: int) -> Verdict:
    """Counts and text of one run."""
    last = [line for line in text.splitlines() if re.search(r" in [\d.]+s", line)]
    counted = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", last[-1] if last else "")}
    count = counted.get
    return Verdict(
        text,
        count("passed", 0),
        count("failed", 0),
        count("skipped", 0),
        count("error", 0),
        count("xfailed", 0),
        count("warning", 0),
        code,
    )


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


WORDS = ("-p", "no:cacheprovider")


def run_pytest(folder: Path, *args: str) -> Verdict:
    """Run pytest on `folder` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *WORDS, *args],
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return read(done.stdout + done.stderr, done.returncode)


@pytest.fixture(scope="session")
def run_folder() -> Runner:
    """Run pytest over a folder that the test has filled."""
    return run_pytest


def run_source(zygote: Any, folder: Path, source: str, *args: str, then_next: bool = False) -> Verdict:
    """Write a test module (imports are there already) and run pytest over it, and what else is there."""
    source += NEXT if then_next else ""
    # What does not need it does without: a user's session need not import torch either.
    torch = re.search(r"\b(torch|dist)\b", source) is not None
    (folder / "test_ranks.py").write_text(HEADER + TORCH * torch + source)
    done = zygote.run(folder, ["-m", "pytest", *WORDS, *args], _environment(), torch=torch)
    return read(done.stdout + done.stderr, done.returncode)


@pytest.fixture(scope="session")
def run_in(zygote: Any) -> Runner:
    """Write a test module into a folder and run pytest with more arguments; for sessions that several tests read."""
    return partial(run_source, zygote)


@pytest.fixture
def run(zygote: Any, tmp_path: Path) -> Runner:
    """Write a test module into the test's own folder and run pytest with more arguments."""
    return partial(run_source, zygote, tmp_path)


@dataclass(frozen=True, slots=True)
class Case:
    """What junit says of one test."""

    outcome: str
    message: str
    text: str


@pytest.fixture(scope="session")
def run_many(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Case]]:
    """Run bodies of tests in one session, each followed by a healthy test; results by name, from junit's file."""

    def runner(bodies: dict[str, str], *args: str) -> dict[str, Case]:
        folder = tmp_path_factory.mktemp("many")
        parts = []
        for name, body in bodies.items():
            parts.append(f"@pytest.mark.world(2, timeout=3)\ndef test_{slug(name)}(world):{body}\n")
            parts.append(NEXT.replace("test_next", f"test_{slug(name)}_next"))
        run_source(zygote, folder, "\n".join(parts), "--junitxml=junit.xml", "-o", "junit_family=xunit2", *args)
        return _cases(folder / "junit.xml")

    return runner


def slug(name: str) -> str:
    """A name as part of a function's name."""
    return re.sub(r"\W+", "_", name)


def _cases(path: Path) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for element in ET.parse(path).getroot().iter("testcase"):
        outcomes = [child for child in element if child.tag in ("failure", "error", "skipped")]
        if not outcomes:
            cases[element.attrib["name"]] = Case("passed", "", "")
        else:
            first = outcomes[0]
            cases[element.attrib["name"]] = Case(first.tag, first.attrib.get("message", ""), first.text or "")
    return cases
