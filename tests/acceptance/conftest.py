"""Drives real pytest, in a process of its own, over small projects that use the plugin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

HEADER = """
import os, signal, sys, threading, time
import pytest, torch
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
    seconds: float

    def counts(self) -> tuple[int, int, int]:
        """Passed, failed, errors."""
        return self.passed, self.failed, self.errors


Runner = Callable[..., Verdict]


def read(result: pytest.RunResult) -> Verdict:
    """Counts and text of one run."""
    counted = result.parseoutcomes() if re.search(r"\d+ \w+.* in [\d.]+s", result.stdout.str()) else {}
    count = counted.get
    return Verdict(
        result.stdout.str() + "\n" + result.stderr.str(),
        count("passed", 0),
        count("failed", 0),
        count("skipped", 0),
        count("errors", 0),
        count("xfailed", 0),
        count("warnings", 0),
        int(result.ret),
        result.duration,
    )


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Write a test module (imports are there already) and run pytest over it with more arguments."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def runner(source: str, *args: str, then_next: bool = False) -> Verdict:
        body = HEADER + source + (NEXT if then_next else "")
        pytester.makepyfile(test_ranks=body)
        result = pytester.runpytest_subprocess("-p", "no:randomly", *args, timeout=120)
        return read(result)

    return runner
