"""Builds, installs and tests what we publish as a user's project does, without this checkout.

    python ci/downstream.py            # a new environment with everything from the package index (`tox -e downstream`)
    python ci/downstream.py --borrow   # the same, but other packages come from the environment that runs this: no network

The wheel is built from the sdist, so that both are tried; then examples/downstream is built, installed beside it, and its
tests run in a folder that holds nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("build", "dist", "report", "htmlcov", "found", "mutants")
"""Of the top of a checkout; below it are packages with such names."""
BUILD = """
import importlib, sys, tomllib
system = tomllib.load(open("pyproject.toml", "rb"))["build-system"]
sys.path[:0] = system.get("backend-path", ())
getattr(importlib.import_module(system["build-backend"]), sys.argv[1])(sys.argv[2])
"""
WHERE = """
import fsdp_testing.base.documentation as pages, fsdp_ref, tinyfsdp
print(pages.__file__, fsdp_ref.__file__, tinyfsdp.__file__, *map(pages.page, ("docs/exit-codes.md", "docs/adapters.md")))
"""


def run(command: list[str], folder: Path) -> str:
    """Run a command without the caller's Python path; what it prints is shown if it fails."""
    hidden = ("PYTHONPATH", "PYTEST_", "COV_", "PIP_REQUIRE_VIRTUALENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        command, cwd=folder, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def left_out(folder: str, names: list[str]) -> list[str]:
    """Return what a fresh clone would not hold."""
    top = PRODUCTS if (Path(folder) / "pyproject.toml").exists() else ()
    return [
        name for name in names if name.startswith(".") or name.endswith((".egg-info", "__pycache__")) or name in top
    ]


def built(source: Path, folder: Path) -> Path:
    """Build a project's sdist, and its wheel from that; return the wheel."""
    folder.mkdir()
    copy = shutil.copytree(source, folder / "source", ignore=left_out)
    run([sys.executable, "-c", BUILD, "build_sdist", str(folder)], copy)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    before = set(unpacked.rglob("*"))
    run([sys.executable, "-B", "-c", BUILD, "build_wheel", str(folder)], unpacked)
    left = sorted(map(str, set(unpacked.rglob("*")) - before))
    if left and source == ROOT:
        sys.exit(f"expected a build that leaves nothing behind, got {left}. See ci/build_backend.py.")
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed_from(path: list[str]) -> list[str]:
    """Return the folders of packages on a path, in its order; an environment may look into a second one's."""
    return [folder for folder in path if Path(folder).name in {"site-packages", "dist-packages"}]


def environment(folder: Path, wheels: list[Path], *, borrow: bool) -> Path:
    """Make an environment with these wheels; return its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    if borrow:
        (site,) = folder.glob("lib/python*/site-packages")
        # A folder that is named here is searched after this one, and its own .pth files (an editable install) are not read.
        (site / "borrowed.pth").write_text("\n".join(installed_from(sys.path)) + "\n", encoding="utf-8")
        pip += ["--no-deps", "--no-index"]
    ours, *theirs = map(str, wheels)
    run([*pip, f"{ours}[verify]", *theirs], folder)
    return python


def main(borrow: bool) -> None:
    """Build, install, test."""
    with tempfile.TemporaryDirectory(prefix="downstream") as name:
        folder = Path(name)
        wheels = [built(ROOT, folder / "ours"), built(ROOT / "examples" / "downstream", folder / "theirs")]
        python = environment(folder / "env", wheels, borrow=borrow)
        project = folder / "project"
        shutil.copytree(ROOT / "examples" / "downstream" / "tests", project / "tests", ignore=left_out)
        places = run([str(python), "-c", WHERE], project).split()
        elsewhere = [place for place in places if not place.startswith(str(folder / "env"))]
        if elsewhere:
            sys.exit(f"expected what was installed, got {elsewhere}: the checkout is seen, or another installation.")
        tests = run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"], project)
        verify = [str(python.parent / "fsdp-verify"), "run", "tinyfsdp", "--check", "training.sgd*", "--html", "report"]
        print(tests, run(verify, project), sep="\n")


if __name__ == "__main__":
    main("--borrow" in sys.argv[1:])
