"""The ranks' shares of the rows: overlaps and losses are found; padding, dropping, drawing and streams are no mistake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from fsdp_testing.script_check.feeding import LoaderSeen
from fsdp_testing.script_check.rows import strange_shares


def run(*ranks, steps=(), due=2, complete=True):
    """Return a run whose ranks take these rows in the one pass over a loader of two rows an item, and those in its steps."""
    loaders = [LoaderSeen(rows=[list(rows)], complete=[complete], batch=2, due=due) for rows in ranks]
    seen = [SimpleNamespace(taken=SimpleNamespace(loaders=[loader] if ranks[0] else [])) for loader in loaders]
    return SimpleNamespace(size=len(ranks), ranks=seen, steps=len(steps), union=lambda step: Counter(steps[step]))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (("ace", "bde"), {}),  # padded by one row
        (("ac", "bd"), {}),  # dropped: of five rows the last
        (("aaaa", "aaaa"), {"due": None, "complete": False}),  # a stream that begins anew
        (("ac", "bd"), {"complete": False}),
    ],
)
def test_what_samplers_and_streams_do_is_no_mistake(ranks, options):
    assert strange_shares(run("abcde", **options), run(*ranks, **options)) == ""


@pytest.mark.parametrize(
    ("ranks", "complete", "message"),
    [
        (
            ("abcd", "cdef"),
            True,
            "in pass 0 over a DataLoader 2 of the rows that one process takes are taken by no rank and 2 of",
        ),
        (("abcdab", "efghcd"), True, "DataLoader 4 of the rows that the ranks take were taken before"),
        (("abc", "bde"), False, "in pass 0 over a DataLoader 1 of the rows that the ranks take were taken before"),
        (
            ("a", "b"),
            True,
            "6 of the rows that one process takes are taken by no rank. Cause: the shares of the ranks overlap or",
        ),
    ],
)
def test_shares_of_a_pass_that_overlap_or_leave_rows_out_are_found(ranks, complete, message):
    assert message in strange_shares(run("abcdefgh"), run(*ranks, complete=complete))


def test_rows_of_a_step_are_lost_or_drawn():
    alone, slices = run("", steps=("abcd", "efgh")), run("", "", steps=("abbc", "effg"))
    assert strange_shares(alone, slices).startswith(
        "at step 0 1 of the rows that one process takes are taken by no rank and 1 of"
    )
    assert strange_shares(alone, run("", "", steps=("abcd", "hgfe"))) == ""
    assert strange_shares(alone, run("", "", steps=("abcdefgh", "ijklmnop"))) == ""  # batches of a rank's own size
    assert (
        strange_shares(run("", steps=("aabc", "ccde")), run("", "", steps=("abbc", "deee"))) == ""
    )  # drawn of few rows
