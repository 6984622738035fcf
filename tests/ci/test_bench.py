"""The arithmetic of `tox -e bench`: ratios with their intervals, what is too wide to say, exponents, the page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench import curves, earlier, exponents, page_of, table_of
from figures import Comparison, exponent, interval


def _comparison(mine: list[float], base: list[float], goal: float | None = None, size: float = 0.0) -> Comparison:
    goals = None if goal is None else {"ours": goal}
    return Comparison(
        "a step", "ms", {"ours": mine, "theirs": base}, ("theirs",), "a curve" if size else "", size, goals
    )


def test_turns_that_other_work_slows_together_leave_the_ratio_as_it_is() -> None:
    base = [10.0, 40.0, 11.0, 90.0, 12.0, 10.0, 10.0]
    low, middle, high = interval([0.5 * seconds for seconds in base], base)
    assert low == middle == high == 0.5


def test_the_interval_of_few_turns_is_all_of_them_and_of_many_is_narrower() -> None:
    ratios = [float(number) for number in range(1, 26)]
    ones = [1.0] * len(ratios)
    assert interval(ratios[:4], ones[:4]) == (1.0, 2.5, 4.0)
    assert interval(ratios, ones) == (8.0, 13.0, 18.0), "the binomial at a half: 7 of 25 or fewer in 2.2 % of runs"


def test_unequal_numbers_of_samples_are_drawn_again_and_give_the_same_each_time() -> None:
    mine, base = [1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9]
    assert interval(mine, base) == interval(mine, base)
    assert interval(mine, base)[1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mine", "goal", "text"),
    [
        ([5.0] * 7, 0.6, "0.50 (0.50 to 0.50); at most 0.60: reached"),
        ([7.0] * 7, 0.6, "0.70 (0.70 to 0.70); at most 0.60: missed"),
        ([5.9, 6.1, 6.0, 6.1, 5.9, 6.0, 6.1], 0.6, "0.60 (0.59 to 0.61); at most 0.60: open"),
        ([2.0, 9.0, 4.0, 12.0, 3.0, 8.0, 5.0], 0.6, "the spread is too wide: 0.20 to 1.20"),
        ([5.0] * 7, None, "0.50 (0.50 to 0.50)"),
    ],
)
def test_a_ratio_says_whether_the_goal_is_reached_or_that_nothing_can_be_said(
    mine: list[float], goal: float | None, text: str
) -> None:
    ours, theirs = _comparison(mine, [10.0] * 7, goal).rows()
    assert ours.ratio_text() == text
    assert theirs.ratio_text() == "the peer"


def test_the_peer_is_the_faster_of_them() -> None:
    samples = {"ours": [1.0] * 5, "slow": [4.0] * 5, "quick": [2.0] * 5}
    comparison = Comparison("a step", "ms", samples, ("slow", "quick"))
    assert comparison.peer == "quick"
    assert [row.ratio_text() for row in comparison.rows()] == ["0.50 (0.50 to 0.50)", "2.00 (2.00 to 2.00)", "the peer"]


def test_an_exponent_is_that_of_the_power_law_and_needs_two_sizes() -> None:
    assert exponent([(size, 3 * size**1.5) for size in (1.0, 4.0, 9.0)]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="at least two sizes"):
        exponent([(2.0, 1.0), (2.0, 3.0)])


def test_the_page_has_every_row_and_curves_with_more_than_one_size() -> None:
    made = [_comparison([size] * 5, [2 * size] * 5, 0.6, size) for size in (1.0, 2.0)]
    assert curves(made) == ["a curve"]
    assert exponents(made, "a curve") == {"ours": pytest.approx(1.0), "theirs": pytest.approx(1.0)}
    page = page_of({"date": "2026-11-24"}, made)
    assert "- date: 2026-11-24" in page
    promised = page.partition("## What is promised")[2].partition("\n## ")[0]
    assert promised.count("| a step | ours | 0.50 (0.50 to 0.50); at most 0.60: reached |") == 2
    assert "pictures/a-curve.svg" in page
    assert curves(made[:1]) == []
    assert table_of(made[0]).row_count == 2


def test_samples_of_an_earlier_run_give_the_same_page(tmp_path: Path) -> None:
    made = [_comparison([size] * 5, [2 * size] * 5, 0.6, size) for size in (1.0, 2.0)]
    (tmp_path / "run.json").write_text(
        json.dumps({"date": "2026-11-24", "comparisons": [asdict(comparison) for comparison in made]})
    )
    assert page_of(*earlier(tmp_path / "run.json")) == page_of({"date": "2026-11-24"}, made)
