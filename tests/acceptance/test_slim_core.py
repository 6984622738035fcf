"""The plugin alone needs pytest and torch; what misses another package is told which extra brings it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]

HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
TEST = """
import pytest

@pytest.mark.world(2)
def test_marked(world): world.barrier()

def run(): return 1

def test_controlling(worlds): assert worlds(2).run(run) == [1, 1]
"""


def command(folder: Path, hidden: str, *words: str) -> subprocess.CompletedProcess[str]:
    hide = HIDING.format(names={hidden})
    program = f"{hide}\nfrom fsdp_testing.cli.main import main\nsys.exit(main({list(words)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_ranks_need_pytest_and_torch_alone(run_folder: Runner, tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(HIDING.format(names={"rich", "jinja2", "hypothesis"}))
    (tmp_path / "test_marked.py").write_text(TEST)
    # Hypothesis brings a plugin of its own, where it is installed.
    verdict = run_folder(tmp_path, "-p", "hidden", "-p", "no:hypothesispytest")
    assert verdict.counts() == (2, 0, 0), verdict.text


@pytest.mark.parametrize(
    ("hidden", "words", "extra"),
    [
        ("rich", ["list", "checks"], "train"),
        ("rich", ["train", "absent.py"], "train"),
        ("jinja2", ["run", "torch-ddp", "--html", "report"], "report"),
    ],
)
def test_a_command_names_the_extra_before_it_starts(tmp_path: Path, hidden: str, words: list[str], extra: str) -> None:
    done = command(tmp_path, hidden, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"fsdp-verify: expected {hidden}, got no such package: run `pip install 'fsdp-testing[{extra}]'`\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_drawn_cases_name_the_extra(tmp_path: Path) -> None:
    program = HIDING.format(names={"hypothesis"}) + "from fsdp_testing.cases.drawing import cases"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "MissingExtra: expected hypothesis" in done.stderr and "fsdp-testing[verify]" in done.stderr


def test_another_missing_package_is_not_ours_to_name(tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text("import no_such_package_of_anybody\n")
    done = command(tmp_path, "rich_of_nobody", "run", "needy:ADAPTER")
    assert "fsdp-testing[" not in done.stderr
