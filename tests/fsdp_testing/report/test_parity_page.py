"""Two sequences as a picture: equal steps joined, the others alone and marked; names are text."""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree as ET

from fsdp_testing.cases.records import History
from fsdp_testing.explain.trace.order_parity import CaseParity
from fsdp_testing.explain.trace.run import Trace
from fsdp_testing.judging.checkers.event_order import compare_steps
from fsdp_testing.report.drawings.order import account, order_picture
from fsdp_testing.report.parity_page import parity_text
from fsdp_testing.report.side_by_side import by_rows

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


def test_the_page_tells_every_case(make: SimpleNamespace) -> None:
    traced = Trace("one", make.case, History(((), ())), ((), ()))
    same = CaseParity(make.case, traced, traced, (compare_steps("units", 0, LEFT, LEFT),), ())
    other = CaseParity(make.case, traced, traced, (compare_steps("memory", 0, LEFT, RIGHT),), ("one: rank 0 <i>",))
    page = parity_text((same, other), ("one", "two & co"))
    assert "1 of 2 cases differ" in page
    assert "Differ in memory." in page
    assert "Same order in every aspect." in page
    assert "two &amp; co" in page
    assert "<i>" not in page
    assert "src=" not in page
    assert "the same order in all 1 cases" in parity_text((same,), ("one", "two"))
