"""Drawings are well-formed, show what was recorded at its place, and hold no text that could be markup."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from fsdp_testing.cases.records import (
    HeldSpan,
    LiveBytes,
    Portrait,
    RankPortrait,
    RunReport,
    Stretch,
    UnitPortrait,
    Verdict,
)
from fsdp_testing.report.conformance import complete_sheet
from fsdp_testing.report.drawings.layout import layout
from fsdp_testing.report.drawings.live_bytes import live_bytes
from fsdp_testing.report.drawings.squares import cube_picture
from fsdp_testing.report.drawings.svg import bytes_text, clipped, ticks
from fsdp_testing.report.drawings.timeline import timeline
from fsdp_testing.report.html import html_text


def page_of(report: RunReport) -> str:
    return html_text(complete_sheet(report))


HOSTILE = '<script>"&'
STRETCHES = (
    Stretch("operation", 0.0, 0.010, "forward-backward"),
    Stretch("forward", 0.0, 0.004, HOSTILE),
    Stretch("backward", 0.004, 0.010, ""),
    Stretch("collective", 0.001, 0.003, "all_gather float64[8]"),
    Stretch("wait", 0.002, 0.003, "for the other ranks"),
    Stretch("gathered", 0.003, 0.009, "a"),
)


@pytest.fixture
def portrait(make: SimpleNamespace) -> Portrait:
    units = (
        UnitPortrait("a", 5, 8, ((HeldSpan(HOSTILE, 0, 3),), (HeldSpan(HOSTILE, 3, 5),))),
        UnitPortrait("", 4, 8, ((HeldSpan("b.weight", 0, 2),), (HeldSpan("b.weight", 2, 4),))),
    )
    live = (LiveBytes(0.0, 40), LiveBytes(0.003, 80), LiveBytes(0.009, 40))
    ranks = (RankPortrait(0, STRETCHES, live), RankPortrait(1, STRETCHES[:4], live[:1]))
    return Portrait("one", make.case, 0.010, ranks, units, 72, "a bound")


def boxes(markup: str, kind: str) -> list[dict[str, str]]:
    return [element.attrib for element in ET.fromstring(markup).iter("rect") if element.get("class") == kind]


def test_every_stretch_is_drawn_where_it_was(portrait: Portrait) -> None:
    drawn = timeline(portrait)
    assert len(boxes(drawn, "forward")) == len(boxes(drawn, "backward")) == len(boxes(drawn, "collective")) == 2
    (wait,) = boxes(drawn, "wait")
    forward, backward = boxes(drawn, "forward")[0], boxes(drawn, "backward")[0]
    assert float(forward["x"]) + float(forward["width"]) == pytest.approx(float(backward["x"]), abs=0.2)
    assert float(wait["width"]) == pytest.approx(float(forward["width"]) / 4, abs=0.2)
    assert "rank 0: gathers: 1, collectives: 1, waiting 1 ms of 10 ms" in ET.fromstring(drawn).attrib["aria-label"]


def test_padding_is_drawn_as_long_as_it_is(portrait: Portrait) -> None:
    drawn = layout(portrait)
    (padding,) = boxes(drawn, "padding")
    first, second, *_ = boxes(drawn, "shard0")
    assert float(first["width"]) == pytest.approx(3 * float(padding["width"]), abs=0.2)
    assert float(second["x"]) + float(second["width"]) == pytest.approx(float(padding["x"]), abs=0.2)
    assert "5 elements; 3 (24 B) a rank; 1 of padding in all" in drawn


def test_the_curve_is_drawn_against_the_bound(portrait: Portrait) -> None:
    drawn = live_bytes(portrait)
    root = ET.fromstring(drawn)
    bound = next(element for element in root.iter("line") if element.get("class") == "bound")
    curve = next(element for element in root.iter("path") if "curve0" in (element.get("class") or ""))
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve.attrib["d"])]
    assert min(heights) < float(bound.attrib["y1"]) < max(heights), "80 bytes are above the bound of 72, 40 below"
    assert "beyond the bound on rank 0 of 72 B" in root.attrib["aria-label"]
    within = live_bytes(replace(portrait, bound_bytes=80))
    assert "within the bound of 80 B" in within


def test_names_are_text(portrait: Portrait) -> None:
    for drawn in (timeline(portrait), layout(portrait), live_bytes(portrait)):
        ET.fromstring(drawn)
        assert "<script>" not in drawn


def test_what_was_not_recorded_is_not_drawn(make: SimpleNamespace) -> None:
    empty = Portrait("one", make.case)
    assert timeline(empty) == layout(empty) == live_bytes(empty) == ""


def test_the_page_shows_portraits_and_remarks(good: RunReport, portrait: Portrait, make: SimpleNamespace) -> None:
    failed = Portrait("two", make.case, remark="two did not run it to its end")
    page = page_of(replace(good, portraits=(portrait, failed)))
    assert page.count("<svg viewBox") == 3
    assert "two did not run it to its end" in page
    assert 'href="#portraits"' in page
    assert HOSTILE not in page
    assert "<svg viewBox" not in page_of(good)


def test_the_page_shows_each_cause_once_with_its_drawing(portrait: Portrait, make: SimpleNamespace) -> None:
    from fsdp_testing.cases.records import Explanation

    shortest = Explanation("It is stale.", ("0 step()",), make.case, 4, 9, 1.5, complete=False, portrait=portrait)
    findings = (make.diverged(cause="x", shortest=shortest), make.diverged(cause="x"))
    results = tuple(make.result("one", name, Verdict.FAIL, findings=findings) for name in ("a.b", "c.d"))
    page = page_of(RunReport(results))
    assert page.count("<h3>It is stale. ") == 1
    assert page.count('Cause: <a href="#c0">It is stale.</a>') == 2
    assert "breaks 2 checks:" in page
    assert page.count("<svg viewBox") == 3


def test_the_moment_from_which_something_is_wrong_is_marked_on_every_rank(portrait: Portrait) -> None:
    operations = sum(stretch.lane == "operation" for stretch in portrait.ranks[0].stretches)
    assert operations
    assert timeline(portrait, wrong=operations - 1).count("wrong from here") == len(portrait.ranks)
    assert "wrong from here" not in timeline(portrait)
    assert "wrong from here" not in timeline(portrait, wrong=operations), "an operation that nobody recorded"


def test_a_collective_that_a_rank_lacks_is_drawn_where_another_has_it(portrait: Portrait) -> None:
    gather, reduce = STRETCHES[3], Stretch("collective", 0.006, 0.008, "reduce_scatter float64[8]")
    last = Stretch("collective", 0.009, 0.010, "all_gather float64[8]")
    first, second = portrait.ranks
    ranks = (
        replace(first, stretches=(gather, reduce, last)),
        replace(second, stretches=(gather, replace(last, start=0.008, stop=0.009))),
    )
    drawn = timeline(replace(portrait, ranks=ranks))
    (missing,) = boxes(drawn, "missing")
    issued = boxes(drawn, "collective")[1]
    assert (missing["x"], missing["width"]) == (issued["x"], issued["width"])
    assert float(missing["y"]) > float(issued["y"]), "on rank 1"
    assert "rank 1: gathers: 0, collectives: 2, 1 missing" in drawn
    assert "missing here: reduce_scatter float64[8], which another rank issued" in drawn
    assert boxes(timeline(portrait), "missing") == []


def test_round_numbers_and_sizes() -> None:
    assert list(ticks(0.035, 8)) == pytest.approx([0.005 * number for number in range(8)])
    assert list(ticks(0.0)) == list(ticks(float("nan"))) == []
    assert [bytes_text(size) for size in (0, 1000, 1024, 3 * 1024**2)] == ["0 B", "1000 B", "1 KiB", "3 MiB"]
    assert clipped("layers.12.attention.weight", 64) == "…on.weight"


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [
        ({"pass": 3}, ["cell holds"]),
        ({"pass": 2, "fail": 1}, ["cell fails some"]),
        ({"pass": 2, "unknown": 1}, ["cell unknown some"]),
        ({"refused": 1}, ["cell refused"]),
        ({"pass": 1, "refused": 1}, ["cell refused some"]),
        ({}, []),
    ],
)
def test_a_square_of_the_cube_shows_the_gravest_verdict(counts: dict[str, int], drawn: list[str]):
    picture = str(cube_picture({"full_shard 2": {"all": counts}}, ["all"], ["full_shard 2"]))
    assert re.findall(r'class="(cell[^"]*)"', picture) == drawn
