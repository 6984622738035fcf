"""docs/design.md and its walks name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = (ROOT, ROOT / "fsdp_ref", ROOT / "fsdp_testing")


def paths_named(text: str) -> set[str]:
    """Paths in backticks that end in `.py` and have a folder; what follows a colon is a name in the file."""
    return {path for path in re.findall(r"`([\w./]+/\w+\.py)", text) if not path.endswith("test_it.py")}


def test_every_file_that_the_design_names_is_there() -> None:
    pages = [ROOT / "docs" / name for name in ("design.md", "appendix/walks.md")]
    named = paths_named("".join(page.read_text(encoding="utf-8") for page in pages))
    absent = sorted(path for path in named if not any((top / path).is_file() for top in TOPS))
    assert len(named) > 80
    assert not absent, f"docs/design.md or its walks name files that are not there: {absent}"


def test_a_file_that_is_gone_would_be_seen() -> None:
    assert paths_named("see `judging/gone.py: judge` and `plugin.py`") == {"judging/gone.py"}


def test_every_document_is_named() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fsdp_testing").rglob("*.py"))
    formats = set(re.findall(r'Format\("fsdp_testing/(\w+)"', sources))
    named = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Documents")[2].partition("\n## ")[0]
    assert len(formats) > 8
    assert sorted(formats - set(re.findall(r"`(\w+)`", named))) == []
