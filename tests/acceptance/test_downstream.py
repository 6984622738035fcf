"""Somebody else's project, with nothing of this checkout: ci/downstream.py builds, installs and runs it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_testing.cli.new_adapter import SKELETON

ROOT = Path(__file__).parents[2]
DOWNSTREAM = ROOT / "examples" / "downstream"


@pytest.mark.slow
def test_its_tests_pass_on_the_wheel_that_is_built_from_the_sdist() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "downstream.py"), "--borrow"],
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed, 3 skipped" in done.stdout
    assert "tinyfsdp  1 of 1 claims hold" in done.stdout
    assert "exit code 0" in done.stdout


def test_its_adapter_is_the_skeleton_with_two_functions_filled_in() -> None:
    def functions(text: str) -> dict[str, str]:
        return {part.name: ast.dump(part) for part in ast.parse(text).body if isinstance(part, ast.FunctionDef)}

    ours, theirs = functions(SKELETON), functions((DOWNSTREAM / "tinyfsdp" / "testing.py").read_text(encoding="utf-8"))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"wrap", "layout"}
