"""A page that a message names can be opened: in a checkout, beside an installed wheel; else its name stands alone."""

from __future__ import annotations

import bz2
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_testing.base import documentation
from fsdp_testing.report.html import linked

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def looked_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    documentation.folder.cache_clear()
    yield
    documentation.folder.cache_clear()


def test_a_checkout_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "__file__", str(ROOT / "fsdp_testing" / "base" / "documentation.py"))
    assert documentation.page("docs/adapters.md") == str(ROOT / "docs" / "adapters.md")
    assert documentation.page("docs/absent.md") == "docs/absent.md"
    monkeypatch.chdir(ROOT)
    assert documentation.page("docs/adapters.md") == "docs/adapters.md"


def test_a_wheel_has_it_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path.resolve() / "site-packages" / "fsdp_testing"
    monkeypatch.setattr(documentation, "__file__", str(package / "base" / "documentation.py"))
    assert documentation.page("docs/exit-codes.md") == "docs/exit-codes.md"
    assert linked("docs/exit-codes.md", {}) == "docs/exit-codes.md"
    page = package / "docs" / "exit-codes.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Design\n")
    documentation.folder.cache_clear()
    assert documentation.page("docs/exit-codes.md") == str(page)
    pages: dict[str, str] = {}
    assert linked("docs/exit-codes.md", pages) == '<a href="#docs/exit-codes.md">docs/exit-codes.md</a>'
    assert pages == {"docs/exit-codes.md": "# Design\n"}
    (package.parent / "secret.md").write_text("mine")
    assert linked("docs/../../secret.md", pages) == "docs/../../secret.md"
    assert list(pages) == ["docs/exit-codes.md"]
    monkeypatch.chdir(ROOT)
    assert documentation.page("docs/exit-codes.md") == "docs/exit-codes.md"  # tox runs an installed wheel in a checkout


def test_a_wheel_has_the_pages_of_findings_in_one_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, cache = tmp_path / "fsdp_testing", tmp_path / "cache"
    monkeypatch.setattr(documentation, "__file__", str(package / "base" / "documentation.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (package / "docs").mkdir(parents=True)
    (package / "docs" / "exit-codes.md").write_text("# Exit codes\n")
    names = ("findings/fsdp1-frozen-units.md", "findings/scripts/fsdp1-frozen-units.py")
    texts = {f"docs/{name}": (ROOT / "docs" / name).read_text(encoding="utf-8") for name in names}
    (package / documentation.ARCHIVE).write_bytes(bz2.compress(json.dumps(texts).encode()))
    documentation.folder.cache_clear()
    for name in names:
        assert documentation.text_of(f"docs/{name}") == (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert documentation.text_of("docs/findings/scripts/absent.py") is None
    assert documentation.page("docs/findings/absent.md") == "docs/findings/absent.md"
    page = cache / "fsdp-testing" / "docs" / names[0]
    for before in (None, "of another version\n"):
        if before is not None:
            page.write_text(before)
        assert documentation.page(f"docs/{names[0]}") == str(page)
        assert page.read_text(encoding="utf-8") == (ROOT / "docs" / names[0]).read_text(encoding="utf-8")
    assert [path.name for path in page.parent.iterdir()] == [page.name]
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert documentation.page(f"docs/{names[0]}") == f"docs/{names[0]}"


def test_each_page_that_messages_and_reports_name_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    packed = {
        str(path.relative_to(ROOT)) for found in listed.values() for pattern in found for path in ROOT.glob(pattern)
    }
    sources = [path for path in (ROOT / "fsdp_testing").rglob("*") if path.suffix in {".py", ".json", ".toml"}]
    named = {name for path in sources for name in re.findall(r"\bdocs/[\w./-]+\.md", path.read_text(encoding="utf-8"))}
    assert "docs/adapters.md" in named
    assert sorted(named - packed) == []
    # Entries of known failures name the page of their defect, and reports show its script.
    folder = ROOT / "docs" / "findings"
    findings = {str(path.relative_to(ROOT)) for path in (*folder.glob("*.md"), *(folder / "scripts").glob("*.py"))}
    overviews = {f"docs/findings/{name}.md" for name in ("README", "campaigns", "known-defects", "limits")}
    assert sorted(findings - packed - overviews) == []
    assert not packed & overviews, "the site has them; the wheel is small"
