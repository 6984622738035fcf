"""The page is complete, self-contained and safe, and its links lead somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_testing.records import RunReport, Verdict
from fsdp_testing.report import write_atomically
from fsdp_testing.report.html import html_text

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements, ids, links and text of a page; complains about tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def ids(self) -> list[str]:
        return [identity for _, attributes in self.elements if (identity := attributes.get("id"))]


@pytest.fixture(params=["good", "mixed", "empty"])
def page(request: pytest.FixtureRequest) -> Page:
    report = RunReport(results=()) if request.param == "empty" else request.getfixturevalue(request.param)
    found = Page(html_text(report))
    assert found.open == []
    return found


def test_ids_are_unique_and_links_lead_to_them(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    for link in page.all("a"):
        assert (link["href"] or "").removeprefix("#") in page.ids


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for _, attributes in page.elements:
        assert not {"src", "srcset", "data-src", "action"} & set(attributes)
    assert page.all("link") == []
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_it_is_made_for_phones_readers_and_printers(page: Page) -> None:
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert page.all("html")[0]["lang"] == "en"
    assert all("scope" in header for header in page.all("th"))


def test_hostile_text_stays_text(mixed: RunReport) -> None:
    text = html_text(mixed)
    page = Page(text)
    assert len(page.all("script")) == 1
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>" in page.text


def test_the_failure_is_told_completely(mixed: RunReport) -> None:
    text = re.sub(r"\s+", " ", Page(html_text(mixed)).text)
    for part in (
        "operation 0 forward_backward(batch 1), ranks 0, 1",
        "gradient of blocks.1.weight",
        "max error 0.37, bound 2e-12 (1.85e+11 times the bound)",
        "12 roundings x u(float64)",
        "fsdp-verify run one --check training.adamw --world-size 2",
        "Exit code 1: a claim was refuted.",
        "2 of 5 claims hold, 1 refuted, 1 unknown, 1 expected to fail, 1 stale, 1 not claimed",
        "what training.sgd shows",
        "one: 1 checks were not run",
    ):
        assert part in text, part


def test_every_trouble_is_linked_from_its_cell(mixed: RunReport) -> None:
    page = Page(html_text(mixed))
    cells = [cell for cell in page.all("td") if "trouble" in (cell.get("class") or "")]
    articles = [article for article in page.all("article") if (article["id"] or "").startswith("r")]
    assert len(cells) == len(articles) == 5
    assert all(article.get("tabindex") == "-1" for article in articles)


def test_many_findings_are_cut_and_counted(make: SimpleNamespace) -> None:
    findings = tuple(make.diverged(operation=index) for index in range(25))
    report = RunReport(results=(make.result("a", "s.c", Verdict.FAIL, findings=findings),))
    text = html_text(report)
    assert text.count('class="finding"') == 20
    assert "5 more failing cases are in the JSON report" in text


def test_text_that_is_no_unicode_does_not_lose_the_report(mixed: RunReport, tmp_path: Path) -> None:
    write_atomically(tmp_path / "page.html", html_text(mixed))
    assert "\\ud800" in (tmp_path / "page.html").read_text(encoding="utf-8")
