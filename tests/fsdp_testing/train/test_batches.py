"""Rows that a forward computed are known by the rows that it computed them of, wherever they come to lie."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from fsdp_testing.train.batches import Computed, near, row_digests

ROWS, NOISE = torch.arange(12.0).reshape(4, 3), torch.arange(8.0).reshape(4, 2)


def given(computed, rows, *, silently=False):
    """Run a model of which the bits depend on the number of rows, and return its output."""
    model = nn.Linear(2, 3)
    with torch.no_grad():
        nn.init.ones_(model.weight)
    if silently:
        with torch.no_grad():
            return computed.silently(lambda: model(rows) + 1e-6 * len(rows), [rows])
    output = model(rows) + 1e-6 * len(rows)
    computed.add(output, row_digests([rows]))
    return output


def test_rows_of_a_forward_that_are_joined_to_others_do_not_depend_on_how_many_were_computed_together():
    for silently in (False, True):
        whole, half = Computed(), Computed()
        torch.manual_seed(0)
        fake = given(whole, NOISE, silently=silently).detach()
        torch.manual_seed(0)
        part = given(half, NOISE[:2], silently=silently).detach()
        assert not torch.equal(fake[:2], part)
        all_rows, own = (
            whole.row_digests([torch.cat([ROWS, fake])]),
            half.row_digests([torch.cat([ROWS[:2], part])]),
        )
        assert all_rows[:4] == row_digests([ROWS])
        assert own == all_rows[:2] + all_rows[4:6]
        assert len({*all_rows}) == 8


def test_targets_beside_rows_of_a_forward_count():
    computed = Computed()
    features = given(computed, NOISE, silently=True)
    one, other = (computed.row_digests([features, targets]) for targets in (torch.zeros(4), torch.ones(4)))
    assert not {*one} & {*other}


def test_a_forward_inside_another_one_is_none_of_its_own():
    computed = Computed()
    with torch.no_grad():
        outer = computed.silently(lambda: computed.silently(lambda: NOISE + 1, [NOISE]) * 2, [NOISE])
    assert computed.row_digests([outer.clone()]) != row_digests([outer])
    assert computed.row_digests([NOISE + 1]) == row_digests([NOISE + 1])


def test_what_is_made_of_the_output_of_a_forward_is_no_data_and_what_is_made_of_data_is():
    computed = Computed()
    shift = torch.zeros(3, requires_grad=True)
    assert computed.row_digests([nn.Linear(2, 3)(NOISE)])  # nothing was run yet: where else would its rows be?
    features = given(computed, NOISE)
    assert computed.row_digests([features.tanh() * 2]) == ()
    assert computed.row_digests([features.tanh(), ROWS]) == row_digests([ROWS])
    assert computed.row_digests([ROWS + shift]) == row_digests([ROWS])


LABELS = torch.arange(4)


@pytest.mark.parametrize(
    ("other", "is_near"),
    [
        ([ROWS * (1 + 1e-6), LABELS], True),
        ([ROWS.flip(0), LABELS.flip(0)], True),
        ([ROWS * (1 + 1e-2), LABELS], False),
        ([ROWS + torch.tensor([1e-6, 0.0, 1e-1]), LABELS], False),
        ([ROWS * (1 + 1e-6), LABELS + 1], False),
        ([ROWS[:3], LABELS[:3]], False),
        ([ROWS * torch.nan, LABELS], False),
        ([ROWS.bool(), LABELS], False),
    ],
)
def test_rows_that_differ_by_roundings_are_near_and_others_are_not(other, is_near):
    assert near(Counter(row_digests([ROWS, LABELS])), Counter(row_digests(other))) is is_near
