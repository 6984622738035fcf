"""The reference computes the same without its fence: the core alone passes the checks that the whole passes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), *filter(None, sys.path)])


def verify(zygote: Any, tmp_path: Path, *arguments: str) -> dict[str, str]:
    """Run `fsdp-verify run` in a process of its own, whose ranks import `core_alone`; return the verdict of each check."""
    report = tmp_path / "report.json"
    command = ["-m", "fsdp_testing.cli", "run", *arguments, "--explain", "0", "--json", str(report)]
    done = zygote.run(tmp_path, command, {**os.environ, "PYTHONPATH": PATH})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    results = json.loads(report.read_text(encoding="utf-8"))["results"]
    return {f"{result['implementation']} {result['check']}": result["verdict"] for result in results}


def test_the_core_alone_trains(zygote: Any, tmp_path: Path) -> None:
    check = ("--check", "accumulation.no_sync_then_reduced", "--world-size", "2,3")
    verdicts = verify(zygote, tmp_path, "core_alone:WRAPPER", "core_alone:COMPOSABLE", *check)
    assert list(verdicts.values()) == ["pass"] * 2


@pytest.mark.slow  # more of what the test above asks with every push
def test_the_core_alone_passes_every_check(zygote: Any, tmp_path: Path) -> None:
    expected = ("--expected-failures", str(HERE / "core_alone.toml"))
    verdicts = verify(zygote, tmp_path, "core_alone:COMPOSABLE", *expected)
    refused_by_the_fence = [name for name, verdict in verdicts.items() if verdict not in {"pass", "not_claimed"}]
    assert refused_by_the_fence == ["core_alone:COMPOSABLE parts.called_inside"]
    assert sum(verdict == "pass" for verdict in verdicts.values()) > 200
    verdicts = verify(zygote, tmp_path, "core_alone:WRAPPER", "--check", "training", "--check", "accumulation")
    assert set(verdicts.values()) <= {"pass", "not_claimed"}
    assert sum(verdict == "pass" for verdict in verdicts.values()) >= 10
