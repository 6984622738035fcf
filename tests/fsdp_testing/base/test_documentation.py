"""A page that a message names can be opened: in a checkout, beside an installed wheel; else its name stands alone."""

from __future__ import annotations

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


@pytest.mark.parametrize("packages", ["lib/python3.11/site-packages", "."])
def test_a_wheel_has_put_it_below_the_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: str) -> None:
    """The second is `pip install --target`."""
    monkeypatch.setattr(
        documentation, "__file__", str(tmp_path / packages / "fsdp_testing" / "base" / "documentation.py")
    )
    assert documentation.page("docs/design.md") == "docs/design.md"
    assert linked("docs/design.md", {}) == "docs/design.md"
    page = tmp_path.resolve() / "share" / "doc" / "fsdp-testing" / "docs" / "design.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Design\n")
    documentation.folder.cache_clear()
    assert documentation.page("docs/design.md") == str(page)
    pages: dict[str, str] = {}
    assert linked("docs/design.md", pages) == '<a href="#docs/design.md">docs/design.md</a>'
    assert pages == {"docs/design.md": "# Design\n"}
    (tmp_path / "share" / "secret.md").write_text("mine")
    assert linked("docs/../../../secret.md", pages) == "docs/../../../secret.md"
    assert list(pages) == ["docs/design.md"]
    monkeypatch.chdir(ROOT)
    assert documentation.page("docs/design.md") == "docs/design.md"  # tox runs an installed wheel in a checkout


def test_each_page_that_the_sources_name_exists() -> None:
    sources = [path for path in (ROOT / "fsdp_testing").rglob("*") if path.suffix in {".py", ".json"}]
    named = {name for path in sources for name in re.findall(r"\bdocs/[\w./-]+\.md", path.read_text(encoding="utf-8"))}
    assert "docs/adapters.md" in named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_folder_of_the_documentation_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    packed = {path for patterns in listed.values() for pattern in patterns for path in ROOT.glob(pattern)}
    pages = {
        path for path in (ROOT / "docs").rglob("*.*") if path.is_file() and not {"__pycache__", "site"} & {*path.parts}
    }
    assert sorted(map(str, pages - packed)) == []
