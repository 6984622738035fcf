"""Verdicts: what several become, what an expectation makes of one, what a process ends with."""

from __future__ import annotations

import itertools

import pytest

from fsdp_testing.cases.records import (
    CAPABILITIES,
    STRATEGIES,
    Verdict,
    check_capabilities,
    exit_code,
    merge,
    opening,
)
from fsdp_testing.errors import InvalidImplementation


def test_nothing_at_all_is_unknown():
    assert merge([]) is Verdict.UNKNOWN


def test_a_refutation_outweighs_everything():
    for others in itertools.combinations(Verdict, 2):
        assert merge([*others, Verdict.FAIL]) is Verdict.FAIL


def test_unknown_is_never_hidden_by_a_pass():
    for other in (Verdict.PASS, Verdict.NOT_CLAIMED, Verdict.EXPECTED_FAILURE, Verdict.STALE):
        assert merge([other, Verdict.UNKNOWN, other]) is Verdict.UNKNOWN


def test_what_is_not_claimed_does_not_weigh():
    assert merge([Verdict.NOT_CLAIMED, Verdict.PASS]) is Verdict.PASS
    assert merge([Verdict.NOT_CLAIMED]) is Verdict.NOT_CLAIMED


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        ([Verdict.PASS, Verdict.NOT_CLAIMED], 0),
        ([Verdict.PASS, Verdict.EXPECTED_FAILURE, Verdict.STALE], 0),
        ([Verdict.PASS, Verdict.UNKNOWN], 3),
        ([Verdict.UNKNOWN, Verdict.FAIL], 1),
    ],
)
def test_exit_codes(verdicts, code):
    assert exit_code(verdicts) == code
    assert (code == 0) == all(verdict.holds for verdict in verdicts)


def test_unknown_tags_are_listed():
    with pytest.raises(InvalidImplementation, match=r"known tags, got 'fast', 'warp'"):
        check_capabilities(["no_sync", "warp", "fast"], "adapter")
    assert check_capabilities(CAPABILITIES, "adapter") == frozenset(CAPABILITIES)


def test_every_strategy_stands_for_a_capability():
    assert set(STRATEGIES.values()) <= set(CAPABILITIES)


@pytest.mark.parametrize(("most", "expected"), [(9, "one two …"), (7, "one …"), (11, "one two six"), (2, "on …")])
def test_a_long_text_ends_after_a_word_and_says_that_more_follows(most, expected):
    assert opening("one two six", most) == expected
