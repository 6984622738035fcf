"""The example of a vendor's backend, installed as a package of its own, runs a test and a check by its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "vendor"


@pytest.fixture(scope="module")
def installed(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed the package: built offline from a copy, into a folder of its own."""
    folder = tmp_path_factory.mktemp("vendor")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(zygote, [*pip, "--target", str(folder / "site"), str(folder / "source")], folder, dict(os.environ))
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "COLUMNS": "160"}


def run(zygote: Any, command: list[str], folder: Path, environment: dict[str, str], code: int = 0) -> str:
    done = zygote.run(folder, command, environment, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def verify(*arguments: str) -> list[str]:
    return ["-m", "fsdp_testing.cli", *arguments]


def test_a_test_runs_on_it(zygote: Any, installed: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "test_on_toyccl.py", tmp_path)
    said = run(zygote, ["-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path, installed)
    assert "2 passed" in said


def test_a_check_runs_on_it(zygote: Any, installed: dict[str, str], tmp_path: Path) -> None:
    words = verify("run", "torch-fsdp2", "--backend", "toyccl", "--check", "training.sgd_momentum")
    said = run(zygote, words, tmp_path, installed)
    assert "1 of 1 claims hold" in said
    assert "toyccl on worlds of 2" in said


def test_it_is_listed_and_its_own_reason_is_told(zygote: Any, installed: dict[str, str], tmp_path: Path) -> None:
    assert "toyccl" in run(zygote, verify("list", "backends"), tmp_path, installed)
    words = verify("run", "torch-fsdp2", "--backend", "toyccl", "--world-size", "5")
    assert "a world of 5 ranks needs 5 devices, 4 found" in run(zygote, words, tmp_path, installed, code=2)


def test_without_the_package_nobody_knows_it(zygote: Any, tmp_path: Path) -> None:
    said = run(zygote, verify("run", "torch-fsdp2", "--backend", "toyccl"), tmp_path, dict(os.environ), code=2)
    assert "expected one of" in said
    assert "got 'toyccl'" in said
