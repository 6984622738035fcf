"""What is chosen from the product of a test's axes: rows in which every pair of values occurs."""

from __future__ import annotations

import itertools

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


def test_what_is_not_chosen_runs_nightly(request):
    items = [item for item in request.session.items if item.originalname == "test_three_axes"]
    everyday = [item for item in items if item.get_closest_marker("slow") is None]
    assert len(everyday) == 4
    assert {item.callspec.params["a"] for item in everyday} == {0, 1}


@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [0, 1])
def test_three_axes(a, b, c):
    """Is here for the test above."""
    assert {a, b, c} <= {0, 1}
