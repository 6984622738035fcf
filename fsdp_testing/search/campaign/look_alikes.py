"""Chooses which failures that look alike a campaign investigates: an investigation costs as much as many cases."""

from __future__ import annotations

from collections import Counter

from fsdp_testing.judging.signature import Signature

AT_FIRST = 3
AT_FIRST_OF_LISTED = 20
"""Of failures that look alike: each listed case decides the exit code."""
LATER_ONE_IN = 25


class LookAlikes:
    """The failures that a campaign has met, by what they look like.

    Args:
        at_first: How many of a group are investigated in any case.
    """

    def __init__(self, at_first: int = AT_FIRST) -> None:
        self._at_first = at_first
        self._met: Counter[Signature] = Counter()
        self._found: set[Signature] = set()
        self._by_rule: Counter[str] = Counter()

    def must_be_investigated(self, signature: Signature) -> bool:
        """Count one more failure that no rule knows; return whether to investigate it.

        As long as all of a group were known failures, the next may be new, and nothing would show it.
        """
        self._met[signature] += 1
        return _is_one_of_few(self._met[signature], self._at_first) or signature not in self._found

    def asks_cause(self, rule: str) -> bool:
        """Count one more failure that looks like a rule; return whether to ask its cause."""
        self._by_rule[rule] += 1
        return _is_one_of_few(self._by_rule[rule], AT_FIRST)

    def add_finding(self, signature: Signature) -> None:
        """Note that the campaign reports a finding that looks so in a batch: more of them need no investigation."""
        self._found.add(signature)


def _is_one_of_few(number: int, at_first: int) -> bool:
    return number <= at_first or number % LATER_ONE_IN == 0
