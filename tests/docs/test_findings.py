"""Every finding has a page, a script that uses torch alone, and a script that still shows it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

FINDINGS = Path(__file__).resolve().parents[2] / "docs" / "findings"
SCRIPTS = sorted((FINDINGS / "scripts").glob("*.py"))
WITHOUT_SCRIPT = {"campaigns.md", "known-defects.md", "limits.md"}
PAGES = sorted(page for page in FINDINGS.glob("*.md") if page.name not in {"README.md", *WITHOUT_SCRIPT})
ALLOWED = {"torch", "collections", "copy", "dataclasses", "tempfile", "pathlib", "gc", "weakref"}
MOST_LINES = 80


def imported(script: Path) -> set[str]:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_each_page_has_its_script_and_each_script_its_page():
    assert [page.stem for page in PAGES] == [script.stem for script in SCRIPTS]
    for page in PAGES:
        assert f"(scripts/{page.stem}.py)" in page.read_text(encoding="utf-8")


def test_the_index_names_every_page_and_no_other():
    index = (FINDINGS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in PAGES} | WITHOUT_SCRIPT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_says_how_to_avoid_it_and_what_upstream_knows(page):
    text = page.read_text(encoding="utf-8")
    assert "**Workaround.**" in text
    upstream = " ".join(text.split("**Upstream.**")[1].split())
    assert "https://github.com/" in upstream or re.search(
        r"[Nn]o (pytorch )?thread (about .{3,60} was )?found in \w+ \d{4}, searching for \"", upstream
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_small_and_need_torch_alone(script):
    assert imported(script) <= ALLOWED
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_still_show_what_they_say(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
