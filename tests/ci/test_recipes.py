"""The recipes of ci/recipes: shells and YAML parse, their commands are ours, and their parts are all there are."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fsdp_testing.cli.main import parser

RECIPES = Path(__file__).parents[2] / "ci" / "recipes"
COMMAND = re.compile(r"fsdp-verify (.*)")
VARIABLE = re.compile(r"\$\{\{[^}]*\}\}|\$\(\([^)]*\)\)|\$\{?\w+\}?")


def commands(path: Path) -> list[argparse.Namespace]:
    """The commands of a recipe, as our own parser reads them; each variable is a number, or a part."""
    found = []
    for line in COMMAND.findall(path.read_text(encoding="utf-8").replace('"$part"', "1/8")):
        words = shlex.split(VARIABLE.sub("1", line))
        found.append(parser().parse_args(words))
    return found


def test_every_recipe_is_tested() -> None:
    assert {path.name for path in RECIPES.iterdir() if path.suffix != ".pyc" and path.is_file()} == {
        *SHELLS,
        "kubernetes.yaml",
        "kubernetes-hosts.yaml",
        "matrix.yml",
        "ray_parts.py",
    }


SHELLS = {"slurm.sh": ["run"], "slurm-array.sh": ["run"], "slurm-merge.sh": ["merge"]}


@pytest.mark.parametrize("name", SHELLS)
def test_shell_recipes(name: str) -> None:
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)
    assert [found.command for found in commands(RECIPES / name)] == SHELLS[name]


def test_the_array_counts_its_parts_from_1() -> None:
    # Parts are counted from 1, as --shard does.
    assert "#SBATCH --array=1-" in (RECIPES / "slurm-array.sh").read_text(encoding="utf-8")


def test_kubernetes_divides_by_the_number_of_its_pods() -> None:
    (job,) = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    (script,) = spec["template"]["spec"]["containers"][0]["command"][2:]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    merge, fuzz = commands(RECIPES / "kubernetes.yaml")
    assert (merge.command, fuzz.command) == ("merge", "fuzz")
    assert fuzz.shard[1] == spec["completions"] == spec["parallelism"]


def test_kubernetes_pods_find_one_another() -> None:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes-hosts.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    (script,) = spec["containers"][0]["command"][2:]
    words = shlex.split(VARIABLE.sub("1", script))
    assert words[words.index("--master-addr") + 1] == f"{name}-0.{spec['subdomain']}"
    assert int(words[words.index("--nnodes") + 1]) == job["spec"]["completions"]
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words[1:])
    assert (options.no_python, options.training_script, options.training_script_args[:2]) == (
        True,
        "python",
        ["-m", "pytest"],
    )


def test_the_matrix_has_every_part_once() -> None:
    workflow = yaml.safe_load((RECIPES / "matrix.yml").read_text(encoding="utf-8"))
    run, merge = commands(RECIPES / "matrix.yml")
    parts = workflow["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert parts == list(range(1, run.shard[1] + 1))
    assert [str(path) for path in merge.reports] == [f"part-{part}.json" for part in parts]
    # `tox -e lint` checks it against GitHub's schema.
    assert "ci/recipes/matrix.yml" in (RECIPES.parents[1] / "tox.ini").read_text(encoding="utf-8")


def test_ray_runs_every_part_and_merges_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for Ray calls tasks at once; one for the command writes what it was asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(RECIPES))
    asked: list[list[str]] = []

    def ran(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words)
        if "--json" in words:
            Path(words[-1]).write_text(words[words.index("--shard") + 1], encoding="utf-8")
        return SimpleNamespace(returncode=1)

    def remote(**_: Any) -> Callable[..., Any]:
        return lambda function: SimpleNamespace(remote=function)

    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=remote, get=list))
    monkeypatch.setattr(sys, "argv", ["ray_parts.py", "my_package:ADAPTER", "3"])
    import ray_parts

    assert ray_parts.main() == 1
    assert [Path(f"part-{part}.json").read_text() for part in (1, 2, 3)] == ["1/3", "2/3", "3/3"]
    found = [parser().parse_args(words[1:]) for words in asked]
    assert [one.command for one in found] == ["run", "run", "run", "merge"]
    assert [str(path) for path in found[3].reports] == ["part-1.json", "part-2.json", "part-3.json"]
