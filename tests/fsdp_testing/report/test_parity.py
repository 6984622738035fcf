"""Two sequences side by side: equal steps joined, the others alone and marked; equal ranks once; names are text."""

from __future__ import annotations

import io
from types import SimpleNamespace
from xml.etree import ElementTree as ET

from rich.console import Console

from fsdp_testing.cases.records import History
from fsdp_testing.explain.trace.order_parity import CaseParity
from fsdp_testing.explain.trace.run import Trace
from fsdp_testing.judging.checkers.event_order import OrderComparison, compare_steps
from fsdp_testing.report.drawings.order import account, order_picture, shown_rows
from fsdp_testing.report.html import html_text
from fsdp_testing.report.parity import by_rows, parity_sheet
from fsdp_testing.report.terminal import print_sheet

LEFT = ("gather a", "free a", *("same",) * 9, "gather b", "x <b>")
RIGHT = ("gather a", "gather a", *("same",) * 9, "gather b")


def classes(markup: str) -> list[str]:
    return [element.attrib["class"] for element in ET.fromstring(markup).iter("rect")]


def test_differences_stand_alone_and_equal_steps_are_joined() -> None:
    comparison = compare_steps("memory", 0, LEFT, RIGHT)
    drawn = order_picture(comparison, "one", "two", full=True)
    assert classes(drawn).count("changed") == 2
    assert classes(drawn).count("only-left") == 1
    assert classes(drawn).count("only-right") == 0
    assert classes(drawn).count("missing") == 1
    joined = [element for element in ET.fromstring(drawn).iter("line") if element.get("class") == "same"]
    assert len(joined) == 11
    assert account(comparison) == "11 equal, 1 different, 1 only left"
    assert "<b>" not in drawn


def test_long_equal_stretches_are_left_out() -> None:
    comparison = compare_steps("memory", 0, LEFT, RIGHT)
    short = order_picture(comparison, "one", "two")
    assert len(classes(short)) < len(classes(order_picture(comparison, "one", "two", full=True)))
    assert "6 equal rows" in short


def test_ranks_that_show_the_same_are_told_once_and_differences_first() -> None:
    equal = [compare_steps("units", rank, LEFT, LEFT) for rank in (0, 1)]
    differ = [compare_steps("memory", rank, LEFT, RIGHT) for rank in (0, 1)]
    assert [(c.aspect, ranks) for c, ranks in by_rows((*equal, *differ))] == [("memory", (0, 1)), ("units", (0, 1))]


def case_of(make: SimpleNamespace, *comparisons: OrderComparison, faults: tuple[str, ...] = ()) -> CaseParity:
    traced = Trace("one", make.case, History(((), ())), ((), ()))
    return CaseParity(make.case, traced, traced, comparisons, faults)


def test_the_page_tells_every_case(make: SimpleNamespace) -> None:
    same = case_of(make, compare_steps("units", 0, LEFT, LEFT))
    other = case_of(make, compare_steps("memory", 0, LEFT, RIGHT), faults=("one: rank 0 <i>",))
    sheet = parity_sheet((same, other), ("one", "two & co"), {"date": "today"})
    page = html_text(sheet)
    assert "1 of 2 cases differ" in page
    assert "Differ in memory" in page or "differ in memory" in page
    assert "same order" in page
    assert "two &amp; co" in page
    assert "<i>" not in page
    assert "src=" not in page
    assert sheet.exit_code == 1
    assert parity_sheet((same,), ("one", "two"), {}).ending == "exit code 0: one and two: the same order in all 1 cases"


def drawn(parity: CaseParity, *, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_sheet(parity_sheet((parity,), ("one", "[two]"), {}, full=full), console, full=full)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_what_differs_and_of_the_same_only_that(make: SimpleNamespace) -> None:
    steps = [f"step {index} [bold]" for index in range(20)]
    equal = compare_steps("units", 0, steps, steps)
    parity = case_of(make, compare_steps("memory", 0, ["other", *steps], ["another", *steps]), equal)
    text = drawn(parity)
    assert "mlp, full_shard, 2 ranks: differ in memory (same units)" in text
    assert "memory, rank 0: 20 equal, 1 different" in text
    assert "18 equal rows" in text
    assert "[two]" in text
    assert "step 1 [bold]" in text
    assert "step 19" not in text
    assert "units, rank 0" not in text
    assert drawn(parity, full=True).count("step 19 [bold]") == 4


def test_marks_and_surroundings() -> None:
    left = ["a", "b", "c", "d", "e", "f", "g", "h"]
    right = ["a", "b", "c", "D", "e", "f", "x", "g", "h"]
    found = compare_steps("units", 0, left, right)
    assert list(shown_rows(found.rows, full=False)) == [
        ("", "...", "1 equal rows"),
        ("", "b", "b"),
        ("", "c", "c"),
        ("≠", "d", "D"),
        ("", "e", "e"),
        ("", "f", "f"),
        (">", "", "x"),
        ("", "g", "g"),
        ("", "h", "h"),
    ]
    assert [mark for mark, *_ in shown_rows(compare_steps("units", 0, ["a", "b"], ["a"]).rows, full=False)] == ["", "<"]
