"""Every code block of the README and of docs/ does what it shows.

A block is fenced with its language; an HTML comment on the line above may say more:

- `python` runs as it stands, in an empty folder (functions sent to ranks need a module: see `file=` below);
- `<!-- file=test_x.py -->` writes the block to that file, for the blocks that follow in the same document;
- `console` and `bash` blocks: each command (after `$ ` in console blocks) that is marked `<!-- run -->` runs and must
  exit with 0, or with N after `<!-- run exit=N -->`; lines below a console command must appear in its output, where
  `...` stands for anything;
- `<!-- shown -->` is only parsed (Python must compile): commands that install things, long runs, output of other tools.

A block without one of these, in a language that can run, is a failure: nothing is silently unchecked.

The pages of `EVERY_TIME` run with every push, and those where nothing runs; the others run nightly (`slow`): what they
show of a command is asked of it under tests/acceptance and tests/fsdp_testing/cli.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EVERY_TIME = ("README.md", "docs/plugin.md", "docs/tutorials/first-test.md")
FENCE = re.compile(r"(?:<!--\s*(?P<note>[^>]*?)\s*-->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
INERT = {"", "text", "toml", "yaml", "ini", "json", "diff", "html"}


@dataclass(frozen=True)
class Block:
    language: str
    note: str
    body: str
    line: int


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match["language"], match["note"] or "", match["body"], text[: match.start()].count("\n") + 1)
        for match in FENCE.finditer(text)
    ]


def run_block(block: Block, folder: Path, zygote: Any) -> None:
    if block.note.startswith("file="):
        target = folder / block.note.removeprefix("file=")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.body, encoding="utf-8")
        if target.suffix == ".py":
            compile(block.body, str(target), "exec")
    elif block.note == "shown":
        if block.language == "python":
            compile(block.body, "<block>", "exec")
    elif block.language == "python":
        done = _run([sys.executable, "-c", block.body], folder, zygote)
        assert done.returncode == 0, done.stdout
    elif block.language in {"console", "bash"} and block.note.startswith("run"):
        _run_commands(block, folder, zygote)
    else:
        assert block.language in INERT, f"line {block.line}: say what to do with this {block.language} block"


def _run_commands(block: Block, folder: Path, zygote: Any) -> None:
    expected = re.search(r"exit=(\d+)", block.note)
    lines = block.body.splitlines()
    if block.language == "bash":
        lines = [f"$ {line}" for line in lines if line.strip() and not line.startswith("#")]
    while lines:
        command, *rest = lines
        assert command.startswith("$ "), command
        shown = []
        while rest and not rest[0].startswith("$ "):
            shown.append(rest.pop(0))
        done = _run(_words(command[2:]), folder, zygote)
        assert done.returncode == int(expected[1] if expected else 0), done.stdout
        for line in filter(str.strip, shown):
            pattern = ".*".join(re.escape(part.strip()) for part in line.split("..."))
            assert re.search(pattern, done.stdout), f"not in the output: {line!r}\n{done.stdout}"
        lines = rest


def _words(command: str) -> list[str]:
    program, *arguments = shlex.split(command, comments=True)
    own = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
    own["fsdp-verify"] = [sys.executable, "-m", "fsdp_testing.cli"]
    return [*own.get(program, [program]), *arguments]


def _run(words: list[str], folder: Path, zygote: Any) -> Any:
    if words[0] == sys.executable and words[1] in ("-m", "-c"):
        return zygote.run(folder, words[1:], os.environ, merged=True, timeout=300)
    return subprocess.run(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )


def _runs(document: Path) -> bool:
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    return any(block.note.startswith("run") or (block.language == "python" and not block.note) for block in blocks)


def _of_tier(document: Path) -> Any:
    name = str(document.relative_to(ROOT))
    return pytest.param(
        document, id=name, marks=[pytest.mark.slow] if _runs(document) and name not in EVERY_TIME else []
    )


@pytest.mark.parametrize("document", [_of_tier(document) for document in DOCUMENTS])
def test_code_blocks(document: Path, tmp_path: Path, zygote: Any) -> None:
    for block in blocks_of(document.read_text(encoding="utf-8")):
        run_block(block, tmp_path, zygote)


def test_links_between_documents_lead_somewhere() -> None:
    assert [(page.name, link) for page in DOCUMENTS for link in dead_links(page)] == []


def dead_links(page: Path) -> list[str]:
    """The links of a page to files that are not there, or to headings that the file lacks."""
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, file, anchor) for file, anchor in links]
    return [
        f"{file}#{anchor}" if anchor else file
        for target, file, anchor in targets
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target))
    ]


@cache
def headings(page: Path) -> set[str]:
    """The anchors that GitHub and Sphinx give to the headings of a page."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# Every host\n\n[x](#every-host) [y](a.md#no-host) [z](b.md) [a](a.md)\n", encoding="utf-8")
    assert dead_links(page) == ["a.md#no-host", "b.md"]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 2\n```\n",
        "```console\n$ python -c 'print(1)'\n2\n```\n",
        "<!-- run -->\n```console\n$ python -c 'print(1)'\n2\n```\n",
        "<!-- run -->\n```bash\npython -c 'raise SystemExit(3)'\n```\n",
        "<!-- shown -->\n```python\ndef (:\n```\n",
        "```bash\nrm -rf build\n```\n",
    ],
)
def test_a_wrong_block_is_noticed(text: str, tmp_path: Path, zygote: Any) -> None:
    (block,) = blocks_of(text)
    with pytest.raises((AssertionError, SyntaxError)):
        run_block(block, tmp_path, zygote)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 1\n```\n",
        "<!-- run -->\n```console\n$ python -c 'print(1, 2, 3)'\n1 ... 3\n```\n",
        "<!-- run exit=3 -->\n```bash\n# a comment\npython -c 'raise SystemExit(3)'\n```\n",
        "<!-- file=deep/a.py -->\n```python\nx = 1\n```\n<!-- run -->\n```bash\npython deep/a.py\n```\n",
        "```toml\n[a]\n```\n",
    ],
)
def test_a_right_block_passes(text: str, tmp_path: Path, zygote: Any) -> None:
    found = blocks_of(text)
    assert found
    for block in found:
        run_block(block, tmp_path, zygote)
