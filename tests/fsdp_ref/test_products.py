"""What is chosen from the product of a test's axes: rows in which every pair of values occurs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest


def pairs_in(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 3), (4, 3, 2, 2, 2), (5, 4, 3, 2), (3, 1, 2)], ids=str)
def test_every_pair_of_values_occurs_in_far_fewer_rows(covering, sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = covering(rows)
    assert pairs_in(rows[number] for number in chosen) == pairs_in(rows)
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(chosen) <= 2 * largest[0] * largest[1]


def test_rows_that_are_left_out_of_a_product_are_not_asked_for(covering):
    rows = [row for row in itertools.product(range(3), repeat=3) if row[:2] != (0, 0)]
    chosen = covering(rows)
    assert pairs_in(rows[number] for number in chosen) == pairs_in(rows)
    assert chosen <= set(range(len(rows)))


PRODUCT = """
    import pytest

    @pytest.mark.parametrize("a", [0, 1])
    @pytest.mark.parametrize("b", [0, 1])
    @pytest.mark.parametrize("c", [0, 1])
    def test_of_three_axes(a, b, c):
        pass

    @pytest.mark.parametrize(("a", "b", "c"), [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 1)])
    @pytest.mark.parametrize("d", [0, 1])
    def test_of_a_table(a, b, c, d):
        pass
"""


def test_what_is_not_chosen_runs_nightly_and_the_rows_of_a_table_are_one_axis(pytester):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = slow: nightly\n")
    pytester.makepyfile(PRODUCT)
    everyday = pytester.runpytest_inprocess("-m", "not slow")
    everyday.assert_outcomes(passed=4 + 10, deselected=4)
    pytester.runpytest_inprocess("-m", "slow").assert_outcomes(passed=4, deselected=4 + 10)
