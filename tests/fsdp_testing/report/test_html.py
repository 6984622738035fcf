"""The page is complete, self-contained and safe, and its links lead somewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_testing.cases.records import ExpectedFailure, Explanation, FailureKind, RunReport, Verdict
from fsdp_testing.report.conformance import complete_sheet
from fsdp_testing.report.files import write_atomically
from fsdp_testing.report.html import begun, html_text

ROOT = Path(__file__).parents[3]
VOID = {"meta", "link", "input", "br", "img", "hr"}


def page_of(report: RunReport) -> str:
    return html_text(complete_sheet(report))


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
    found = Page(page_of(report))
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
    text = page_of(mixed)
    page = Page(text)
    assert len(page.all("script")) == 1
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>" in page.text


def test_the_failure_is_told_completely(mixed: RunReport) -> None:
    text = re.sub(r"\s+", " ", Page(page_of(mixed)).text)
    for part in (
        "operation 0 forward_backward(batch 1), ranks 0, 1",
        "gradient of blocks.1.weight",
        "max error 0.37, bound 2e-12 (1.85e+11 times the bound)",
        "12 roundings x u(float64)",
        "fsdp-verify run one --check training.adamw --world-size 2",
        "2 new failures, 1 unknown, 1 known failure, 1 listed as known that does not fail; 3 claims hold.",
        "Exit code 1: a claim was refuted",
        "2 of 5 claims hold, 1 refuted, 1 unknown, 1 expected to fail, 1 stale, 1 not claimed",
        "what training.sgd shows",
        "one: 1 check not run",
    ):
        assert part in text, part


def test_every_trouble_is_linked_from_its_cell(mixed: RunReport) -> None:
    page = Page(page_of(mixed))
    cells = [cell for cell in page.all("td") if "trouble" in (cell.get("class") or "")]
    articles = [article for article in page.all("article") if (article["id"] or "").startswith("r")]
    assert len(cells) == len(articles) == 5
    assert all(article.get("tabindex") == "-1" for article in articles)


def test_the_first_screen_answers_three_questions(mixed: RunReport) -> None:
    text = re.sub(r"\s+", " ", Page(page_of(mixed)).text)
    first = text[: text.index("Suites")]
    for part in (
        "84 tensors compared with those of one process, in 7 cases on 2 ranks.",
        "1 check gave no verdict; that is never counted as a pass.",
        "one: after operation 0 the gradient of blocks.1.weight is off by 0.37",
        "Known and expected: 1 check for 1 reason",
        "Run the first new failure again, alone: fsdp-verify run one --check training.adamw --world-size 2",
        "Take these off the list of expected failures, because they hold: one clip.one.",
    ):
        assert part in first, part


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        ([Verdict.PASS, Verdict.NOT_CLAIMED], "good"),
        ([Verdict.PASS, Verdict.EXPECTED_FAILURE], "known"),
        ([Verdict.PASS, Verdict.STALE], "known"),
        ([Verdict.PASS, Verdict.UNKNOWN], "unknown"),
        ([Verdict.NOT_CLAIMED], "unknown"),
        ([Verdict.UNKNOWN, Verdict.EXPECTED_FAILURE, Verdict.FAIL], "bad"),
    ],
)
def test_only_a_run_in_which_all_claims_hold_is_green(
    make: SimpleNamespace, verdicts: list[Verdict], state: str
) -> None:
    report = RunReport(tuple(make.result("a", f"s.c{number}", verdict) for number, verdict in enumerate(verdicts)))
    assert f'<p class="banner {state}">' in page_of(report)


def test_suites_are_folded_where_nobody_must_look(make: SimpleNamespace) -> None:
    verdicts = {"good": Verdict.PASS, "known": Verdict.EXPECTED_FAILURE, "idle": Verdict.NOT_CLAIMED}
    verdicts |= {"bad": Verdict.FAIL, "lost": Verdict.UNKNOWN, "old": Verdict.STALE}
    report = RunReport(tuple(make.result("a", f"{suite}.c", verdict) for suite, verdict in verdicts.items()))
    found = re.findall(r'<details class="suite"( open)?><summary><strong>(\w+)</strong>', page_of(report))
    assert {suite for opened, suite in found if opened} == {"bad", "lost", "old"}
    assert len(found) == len(verdicts)


def test_the_picture_of_a_cause_marks_where_it_goes_wrong(make: SimpleNamespace) -> None:
    schedule = ("0 forward_backward(batch 0)", "1 step()", "2 forward_backward(batch 1)", "3 observe()")
    shortest = Explanation("it is wrong", schedule, make.case, left_out=3, runs=1, seconds=0.1, complete=True)
    finding = make.diverged(
        operation=9,
        operation_text="operation 9 forward_backward(batch 1)",
        ranks=(1,),
        wrong_on=(1,),
        statement="w is off",
        shortest=shortest,
    )
    text = page_of(RunReport((make.result("a", "s.c", Verdict.FAIL, findings=(finding,)),)))
    (marked,) = re.findall(r'<li class="wrong">(.*?)</li>', text, re.DOTALL)
    assert "forward_backward(batch 1)" in marked
    assert "rank 0 ✓" in marked
    assert "rank 1 ✗" in marked
    assert "w is off" in marked
    for other in (replace(finding, wrong_on=(0, 1)), replace(finding, wrong_on=()), replace(finding, kind="disagreed")):
        text = page_of(RunReport((make.result("a", "s.c", Verdict.FAIL, findings=(other,)),)))
        assert "rank 0 ✓" not in text, "no rank is right that is wrong too, or of which nobody knows"
        assert ("rank 0 ✗" in text) == (other.wrong_on == (0, 1))
    elsewhere = replace(finding, operation_text="somewhere in the program")
    text = page_of(RunReport((make.result("a", "s.c", Verdict.FAIL, findings=(elsewhere,)),)))
    assert '<li class="wrong">' not in text, "nothing is marked where nobody knows"


def test_known_failures_are_one_entry_for_each_page_with_its_threads(make: SimpleNamespace) -> None:
    thread = "https://github.com/pytorch/pytorch/issues/1"
    results = tuple(
        make.result(
            "a",
            f"s.c{number}",
            Verdict.EXPECTED_FAILURE,
            expected=f"so it is: page.md, {thread}. <b>",
            findings=(make.diverged(),),
        )
        for number in range(3)
    )
    page = Page(page_of(RunReport(results)))
    assert [article["id"] for article in page.all("article") if (article["id"] or "")[0] == "k"] == ["k0"]
    links = [link for link in page.all("a") if (link["href"] or "").startswith("https:")]
    assert {link["href"] for link in links} == {thread}
    text = page_of(RunReport(results))
    assert '<a href="#k0">so it is</a></li>' in text.partition('id="known"')[0], "the first screen names them"
    folded = text[text.index('<details class="one-by-one">') :]
    assert folded.index('id="r0"') < re.search(r"</details>\s+</section>", folded).start(), "each by itself is folded"


def test_the_pages_that_a_report_names_are_in_it(make: SimpleNamespace) -> None:
    """It is read on machines that have no other file."""
    known = ExpectedFailure("so it is", FailureKind.DIVERGED, page="docs/findings/fsdp1-frozen-units.md")
    failed = make.result("a", "s.c", Verdict.EXPECTED_FAILURE, findings=(make.diverged(expected=known),))
    text = page_of(RunReport((failed,)))
    page = Page(text)
    assert not [link for link in page.all("a") if (link["href"] or "").startswith("file:")]
    assert {"href": f"#{known.page}"} in page.all("a")
    assert known.page in page.ids
    told = (ROOT / known.page).read_text(encoding="utf-8")
    assert " ".join(told.split()) in " ".join(page.text.split())
    script = (ROOT / "docs/findings/scripts/fsdp1-frozen-units.py").read_text(encoding="utf-8")
    numbered = text[text.index('<pre class="numbered"') :]
    assert numbered[: numbered.index("</pre>")].count("<span>") == len(script.splitlines())


def test_a_reader_sees_at_once_when_of_what_and_how_it_was_made(mixed: RunReport) -> None:
    facts = {"date": "2026-11-24 20:00 UTC", "commit": "abc123", "command": "fsdp-verify run one", "torch": "2.13"}
    text = page_of(replace(mixed, environment=facts))
    above = Page(text[text.index("<header>") : text.index("</header>")]).text
    assert not [value for value in facts.values() if value not in above]


@pytest.mark.parametrize(
    ("kinds", "cost"),
    [
        (["diverged"], "silent wrong training"),
        (["raised", "disagreed"], "silent wrong training"),
        (["hung"], "loud error"),
        (["excess", "kept"], "needs memory"),
        (["excess"], "slower"),
    ],
)
def test_a_failure_says_what_it_costs_and_costs_are_counted(make: SimpleNamespace, kinds: list[str], cost: str) -> None:
    findings = tuple(make.diverged(kind=FailureKind(kind), cause="x") for kind in kinds)
    text = page_of(RunReport((make.result("a", "s.c", Verdict.FAIL, findings=findings),)))
    assert f'<span class="severity">{cost}</span>' in text
    assert f"New: 1 {cost}." in text[: text.index('id="causes"')]


def test_what_few_look_for_is_folded(mixed: RunReport) -> None:
    text = page_of(mixed)
    before, rest = text.split("<h2>Everything else</h2>")
    for title in ("Margins and durations", "Environment", "Not claimed"):
        assert f"<h2>{title}" not in before
        assert f"{title}</h" in rest
    assert rest.index("<details>") < rest.index("Margins")
    assert "<details open" not in rest[: rest.index("Margins")]


def test_a_name_in_code_keeps_its_letters() -> None:
    assert (begun("zero_grad leaves it"), begun("module.to raises")) == ("zero_grad leaves it", "module.to raises")
    assert begun("gathered weights, old") == "Gathered weights, old"


def test_an_adapter_is_called_by_its_own_name_and_run_by_the_other(make: SimpleNamespace) -> None:
    failed = make.result("pkg.mod:ADAPTER", "s.c", Verdict.FAIL, findings=(make.diverged(),))
    report = RunReport((failed,), ("pkg.mod:ADAPTER",), own_names={"pkg.mod:ADAPTER": "acme"})
    assert RunReport.from_json(report.to_json()).own_names == report.own_names
    text = page_of(report)
    assert "<h1>acme</h1>" in text
    assert "<title>acme: " in text
    assert "fsdp-verify run pkg.mod:ADAPTER --check s.c" in text


def test_many_findings_are_cut_and_counted(make: SimpleNamespace) -> None:
    findings = tuple(make.diverged(operation=index) for index in range(25))
    report = RunReport(results=(make.result("a", "s.c", Verdict.FAIL, findings=findings),))
    text = page_of(report)
    assert text.count('class="finding"') == 20
    assert "5 more failing cases are in the JSON report" in text


def test_text_that_is_no_unicode_does_not_lose_the_report(mixed: RunReport, tmp_path: Path) -> None:
    write_atomically(tmp_path / "page.html", page_of(mixed))
    assert "\\ud800" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_no_control_character_of_a_run_is_in_the_page(mixed: RunReport) -> None:
    hostile = "\x1b[2J\x07\x9b1A\x00"
    report = replace(mixed, environment={hostile: hostile}, backend=hostile)
    text = page_of(report)
    assert "\\x1b[2J" in text
    assert not set("\x1b\x07\x9b\x00\r") & set(text)
