"""The navigation of the site has each page once, and its reference each public module."""

from __future__ import annotations

from pathlib import Path

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
