"""Somebody else's project, with nothing of this checkout: ci/downstream.py builds, installs and runs it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_testing.checks.suites import CHECKS
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
    text = (DOWNSTREAM / "tinyfsdp" / "testing.py").read_text(encoding="utf-8")
    claimed = ast.literal_eval(re.findall(r"capabilities=frozenset\((.*)\)", text)[0])
    asked = [check for name, check in CHECKS.items() if name.startswith("training.") or name == "sizes.uneven"]
    judged = sum(check.needs <= claimed for check in asked)
    passed, skipped = map(int, re.findall(r"(\d+) passed, (\d+) skipped", done.stdout)[0])
    assert skipped == len(asked) - judged, "what is not claimed, and nothing else"
    assert passed > judged > 0
    assert "tinyfsdp  1 of 1 claims hold" in done.stdout
    assert "exit code 0" in done.stdout


def test_its_adapter_is_the_skeleton_with_two_functions_filled_in() -> None:
    def functions(text: str) -> dict[str, str]:
        return {part.name: ast.dump(part) for part in ast.parse(text).body if isinstance(part, ast.FunctionDef)}

    ours, theirs = functions(SKELETON), functions((DOWNSTREAM / "tinyfsdp" / "testing.py").read_text(encoding="utf-8"))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"wrap", "layout"}
