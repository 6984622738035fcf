"""Tests mirror packages, and workflows do nothing that a developer cannot do at home."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tree_rules import PACKAGES, ROOT, python_files

# Test folders that are about the tree or the product as a whole, not about one package.
WHOLE = {"arch", "docs", "quality", "acceptance", "sessions"}
# Tests of one package that go through all of its layers, a file for each behaviour.
BEHAVIOURS = "behaviours"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RUN_STEPS = re.compile(
    r"tox -e [\w,-]+( -- [\w ./*\[\]-]+)?"
    r"|python -m pip install -c ci/constraints\.txt tox"
    r"|(bash )?(ci/|\.ci/run)[\w./ -]*"
)


def run_lines(workflow: Path) -> list[str]:
    """What a workflow runs, once for every value of its matrices."""
    lines: list[str] = []
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            found = step.get("run", "").strip().splitlines()
            for name, values in matrix.items():
                mark = f"${{{{ matrix.{name} }}}}"
                found = [line.replace(mark, value) for line in found for value in (values if mark in line else [""])]
            lines += map(str.strip, found)
    return lines


def tox_environments() -> set[str]:
    """Environments that tox.ini declares, `{a,b}` in a name taken apart."""
    names = re.findall(r"^\[testenv:([^\]]+)\]", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.M)
    parts = [re.fullmatch(r"([\w-]+)(?:\{([\w,]+)\})?", name) for name in names]
    return {part[1] + factor for part in parts if part for factor in (part[2] or "").split(",")}


def test_an_environment_that_runs_the_command_has_what_the_command_needs() -> None:
    """`tox -e verify-sim` ended before its first check: it had no rich, and its example was installed before this package."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    lacking = []
    for name in tox.sections():
        environment = {**tox["testenv"], **tox[name]}
        needed = {"test", "verify"} & set(environment.get("extras", "").split())
        if "fsdp-verify" in environment.get("commands", "") and not needed:
            lacking.append(f"{name}: no extra that has the command's packages")
        if "./" in environment.get("deps", ""):
            lacking.append(f"{name}: what is in this tree may need this package, which tox installs after deps")
    assert not lacking, lacking


def test_every_test_folder_mirrors_a_package() -> None:
    strangers = []
    for path in python_files("tests"):
        folder = path.parent.relative_to("tests")
        if folder == Path() or folder.parts[0] in WHOLE or BEHAVIOURS in folder.parts:
            continue
        if not (ROOT / folder).is_dir() and not (ROOT / folder).with_suffix(".py").is_file():
            strangers.append(str(path))
    assert not strangers, f"no package or module of that name: {strangers}"


def test_every_package_has_tests() -> None:
    packages = {path.parent for path in python_files(*PACKAGES) if path.name == "__init__.py" and len(path.parts) == 3}
    bare = [str(p) for p in sorted(packages) if not any(python_files(f"tests/{p}"))]
    assert not bare, f"packages without a test folder: {bare}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_tox_and_ci_alone_and_pin_their_actions(path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in document["jobs"].values() for step in job["steps"]]
    assert steps
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}|\./[\w./-]+", step["uses"]), (
                f"not pinned by hash: {step['uses']}"
            )
    for line in run_lines(path):
        assert RUN_STEPS.fullmatch(line), f"{path.name} does what nobody does at home: {line!r}"


def test_there_are_workflows() -> None:
    assert {path.name for path in WORKFLOWS} >= {"tests.yml", "nightly.yml"}


def test_every_test_is_run_by_exactly_one_job_of_each_python() -> None:
    document = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    jobs = document["jobs"]["suite"]["strategy"]["matrix"]["folders"]
    places = [place.relative_to(ROOT) for job in jobs for pattern in job.split() for place in ROOT.glob(pattern)]
    assert len(places) == len(set(places)), "a folder is named twice"
    for path in python_files("tests"):
        if path.name.startswith("test_"):
            found = [place for place in places if place == path or place in path.parents]
            assert len(found) == 1, f"{path} is run by {len(found)} jobs"


def test_workflow_environments_exist() -> None:
    known = tox_environments()
    assert {"cpu", "torch-oldest", "torch-newest"} <= known
    for path in WORKFLOWS:
        for group in re.findall(r"tox -e ([\w,-]+)", "\n".join(run_lines(path))):
            assert set(group.split(",")) <= known, f"{path.name}: tox.ini has no environment {group}"


def places_named(source: str) -> Iterator[str]:
    """Files and folders of ours that code names: `_HOME / "room" / "file.py"`, and `"fsdp_testing/room/file.py"`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"fsdp_(testing|ref)/[\w/]+\.py", node.value):
                yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts: list[str] = []
            left: ast.expr = node
            while isinstance(left, ast.BinOp) and isinstance(left.right, ast.Constant):
                parts.insert(0, str(left.right.value))
                left = left.left
            if isinstance(left, ast.Name) and left.id == "_HOME" and parts:
                yield "/".join(("fsdp_testing", *parts))


def test_places_that_code_names_exist():
    """What frames of which file mean (the harness, a user's code) is decided by path: one that is gone changes who is blamed."""
    named = {
        place for path in python_files(*PACKAGES) for place in places_named((ROOT / path).read_text(encoding="utf-8"))
    }
    assert "fsdp_testing/cases/models" in named
    assert sorted(place for place in named if not (ROOT / place).exists()) == []


def test_a_place_that_is_gone_is_named():
    assert list(places_named('x = {_HOME / "zoo", "fsdp_testing/pool/worker.py"}')) == [
        "fsdp_testing/zoo",
        "fsdp_testing/pool/worker.py",
    ]
