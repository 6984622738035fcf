"""The navigation of the site has each page once, and its reference each public module."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ["Tutorials", "How-to", "Reference", "Explanation and results"]
TUTORIAL_WORDS = 600


def pages(entries: list[dict[str, object]]) -> list[str]:
    named = [str(entry["file"]) for entry in entries if "file" in entry]
    return named + [page for entry in entries for page in pages(entry.get("entries", []))]  # type: ignore[arg-type]


def test_each_page_stands_in_one_of_four_groups() -> None:
    toc = yaml.safe_load((ROOT / "docs" / "site" / "toc.yml").read_text(encoding="utf-8"))
    assert [group["caption"] for group in toc["subtrees"]] == GROUPS
    named = [page for group in toc["subtrees"] for page in pages(group["entries"])]
    assert len(named) == len(set(named)), "a page stands twice"
    assert [page for page in named if not (ROOT / f"{page}.md").is_file()] == []
    folders = ("docs", "docs/tutorials", "docs/reference")
    there = {str(path.relative_to(ROOT).with_suffix("")) for folder in folders for path in (ROOT / folder).glob("*.md")}
    assert there - set(named) == set(), "write it into docs/site/toc.yml"


def test_a_tutorial_is_short_and_leads_on() -> None:
    tutorials = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    assert len(tutorials) == 10
    for path in tutorials:
        text = path.read_text(encoding="utf-8")
        assert len(text.split()) <= TUTORIAL_WORDS, path.name
        assert "## Next" in text, path.name
        assert "<!-- run" in text or path.name == "your-backend.md", f"{path.name}: nothing runs"


INSIDES = {"fsdp-as-a-program.md"}
"""Pages that read the code, and import what is no public name."""


def resolve(path: str) -> object:
    """Return the object of a dotted path: a module, or a name in one."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(resolve(module), name)


def public(module: str) -> list[str]:
    """The names of a module that its page shows: `__all__`, or the classes and functions that it defines."""
    home = importlib.import_module(module)
    own = [name for name, one in vars(home).items() if getattr(one, "__module__", "") == module]
    return [name for name in getattr(home, "__all__", own) if not name.startswith("_")]


def documented() -> Iterator[str]:
    """The paths of all names on the pages of the reference."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for kind, path in re.findall(r"\.\. auto(\w+):: (\S+)", page.read_text(encoding="utf-8")):
            yield from (f"{path}.{name}" for name in public(path)) if kind == "module" else (path,)


def described(one: object) -> bool:
    """Whether an object has words of its own, and each public method and property of a class has."""
    if inspect.isclass(one):
        methods = [m for name, m in vars(one).items() if not name.startswith("_")]
        shown = [m for m in methods if isinstance(m, (property, classmethod, staticmethod)) or inspect.isfunction(m)]
        bases = [vars(base) for base in one.__mro__[1:]]
        return bool(vars(one).get("__doc__")) and all(
            inspect.getdoc(m) or any(inspect.getdoc(base.get(m.__name__)) for base in bases if base.get(m.__name__))
            for m in shown
            if hasattr(m, "__name__")
        )
    return not callable(one) or bool(inspect.getdoc(one))


def test_every_public_name_is_described() -> None:
    pytest.importorskip("hypothesis", reason="`cases` draws with it")
    assert len(set(documented())) > 100
    assert sorted(path for path in documented() if not described(resolve(path))) == []


def test_what_a_page_imports_is_in_the_reference() -> None:
    names = {path.rpartition(".")[2]: path for path in documented()}
    missing = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]:
        text = page.read_text(encoding="utf-8") if page.name not in INSIDES else ""
        for home, imported in re.findall(r"^from (fsdp_[\w.]+) import ([\w, ]+)$", text, re.M):
            plain = [name.split(" as ")[0].strip() for name in imported.split(",")]
            missing += [f"{page.name}: {home}.{name}" for name in plain if name not in names and name != "drawing"]
    assert missing == []


def test_a_name_without_words_would_be_seen() -> None:
    def silent() -> None: ...

    class Half:
        """Words."""

        def method(self) -> None: ...

    assert not described(silent)
    assert not described(Half)
    assert described(resolve("fsdp_testing.run_ranks"))
