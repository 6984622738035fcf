"""Rows that differ are shown with their surroundings; equal ranks are reported once."""

from __future__ import annotations

import io

from rich.console import Console

from fsdp_testing.judging.checkers.event_order import OrderComparison, compare_steps
from fsdp_testing.report.side_by_side import by_difference, order_table, shown_rows


def drawn(comparison: OrderComparison, *, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(order_table(comparison, "one", "[two]", full=full))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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


def test_a_long_equal_tail_is_left_out_unless_asked_for() -> None:
    steps = [f"step {index}" for index in range(20)]
    found = compare_steps("units", 0, ["other", *steps], ["another", *steps])
    assert "18 equal rows" in drawn(found)
    assert "step 19" not in drawn(found)
    assert "step 19" in drawn(found, full=True)


def test_names_are_no_markup() -> None:
    found = compare_steps("units", 0, ["gather [bold]"], ["gather"])
    assert "[two]" in drawn(found)
    assert "[bold]" in drawn(found)


def test_ranks_that_show_the_same_are_told_once() -> None:
    differ = [compare_steps("units", rank, ["a"], ["b"]) for rank in (0, 2)]
    alone = compare_steps("units", 1, ["a"], ["c"])
    equal = compare_steps("units", 3, ["a"], ["a"])
    found = by_difference([differ[0], alone, differ[1], equal])
    assert [ranks for _, ranks in found] == [(0, 2), (1,)]
