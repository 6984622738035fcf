"""One sheet is printed and written as a page: every kind of block is in both, what is folded or drawn where it belongs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fsdp_testing.report.html import html_text
from fsdp_testing.report.sheet import (
    Article,
    Cell,
    Facts,
    Fold,
    Group,
    Line,
    Link,
    Listing,
    Picture,
    Row,
    RowGroup,
    Section,
    Sheet,
    Steps,
    Table,
    bulleted,
)
from fsdp_testing.report.terminal import print_sheet

TABLE = Table("cells", ("left", "right"), (RowGroup((Row("a row", (Cell("x1"), Cell("x2", "fail")), "a meaning"),)),))
BLOCKS = (
    Line("a line", links=(Link("one", "here"), Link("two", "here")), command="run --it"),
    bulleted(["an item"]),
    Facts((("a name", "a value"),)),
    Steps(("0 forward()", "1 step()"), 1, ((0, True), (1, False)), "it is stale"),
    Listing("first\n  second"),
    Fold("folded", (Line("inside"),)),
    Fold("open", (Line("in sight"),), unfolded=True),
    Group((Line("in a group"),), "pair"),
    Picture("<svg/>", "what is drawn", "a drawing", table=TABLE),
)
SHEET = Sheet(
    "title", 1, "it failed", sections=(Section("part", (Article("what", BLOCKS, "who", "fail"),), anchor="here"),)
)


def printed(sheet: Sheet, *, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_sheet(sheet, console, full=full)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


WORDS = (
    "part",
    "what",
    "who",
    "a line",
    "one",
    "two",
    "run --it",
    "an item",
    "a name",
    "a value",
    "forward()",
    "step()",
)
WORDS += ("  second", "open", "in sight", "in a group")
DRAWN = ("a row", "x1", "x2", "left", "right")


def test_every_block_is_printed_and_on_the_page() -> None:
    text, page = printed(SHEET), html_text(SHEET)
    assert not [word for word in (*WORDS, *DRAWN) if word not in text]
    assert not [word for word in (*WORDS, "What is drawn", "&lt;svg/&gt;") if word not in page]


def test_what_is_folded_is_for_those_who_ask_and_for_the_page() -> None:
    assert "inside" not in printed(SHEET)
    assert "inside" in printed(SHEET, full=True)
    assert "<summary>folded</summary>" in html_text(SHEET)


def test_the_moment_at_which_it_goes_wrong_is_marked_on_the_page() -> None:
    page = " ".join(html_text(SHEET).split())
    assert '<li class="wrong"><code>step()</code>' in page
    assert "rank 0 ✗" in page
    assert "rank 1 ✓" in page
    assert "it is stale" in page


def test_a_terminal_shows_the_first_of_many_and_counts_the_rest() -> None:
    lines = tuple(Line(f"reason {number}") for number in range(12))
    sheet = Sheet("title", 3, "", sections=(Section("why", lines, at_sight=10),))
    text = printed(sheet)
    assert "reason 9" in text
    assert "reason 10" not in text
    assert "and 2 more; --html or --json has all" in text
    assert "reason 11" in html_text(sheet)


@pytest.mark.parametrize(
    ("code", "known", "state"), [(0, False, "good"), (0, True, "known"), (1, False, "bad"), (3, True, "unknown")]
)
def test_green_is_for_what_holds(code: int, known: bool, state: str) -> None:
    sheet = Sheet("title", code, "so it is", known=known)
    assert sheet.state == state
    assert sheet.ending == f"exit code {code}: so it is"
    assert f'<p class="banner {state}">Exit code {code}: so it is.</p>' in html_text(sheet)


def test_markup_of_a_run_is_text_in_every_block() -> None:
    hostile = "<b>&"
    blocks = (
        Line(hostile, links=(Link(hostile, "here"),), command=hostile, addresses=True),
        Facts(((hostile, hostile),)),
        Steps((hostile,), 0, ((0, True),), hostile),
        Listing(hostile),
        Fold(hostile, (Article(hostile, (), hostile),)),
        Table(
            hostile,
            (hostile,),
            (RowGroup((Row(hostile, (Cell(hostile, title=hostile),), hostile),), hostile, hostile),),
        ),
    )
    sheet = Sheet(
        hostile, 1, hostile, blocks, (Section(hostile, (), hostile, "here", hostile),), subject=hostile, foot=hostile
    )
    assert "<b>" not in html_text(sheet)
    assert printed(sheet, full=True).count(hostile) > 10
