"""What has a campaign exercised so far? Pairs of consecutive operations under each strategy, pairs of tags, arcs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import combinations, pairwise

from fsdp_testing.findings.tags import tags, tokens
from fsdp_testing.records import Case


def _number(kind: str, one: str, other: str) -> int:
    return zlib.crc32(f"{kind}|{one}|{other}".encode())


def keys_of(case: Case) -> frozenset[int]:
    """Returns what a legal case covers, as numbers that are equal on every run."""
    held = sorted(tags(case))
    program = ("begin", *tokens(case), "end")
    operations = {_number(case.strategy, one, other) for one, other in pairwise(program)}
    return frozenset(operations | {_number("tags", one, other) for one, other in combinations(held, 2)})


class Coverage:
    """What was covered, and how much of it was new each time."""

    def __init__(self, keys: Iterable[int] = (), arcs: Iterable[int] = ()) -> None:
        self.keys = set(keys)
        self.arcs = set(arcs)

    def add(self, case: Case, arcs: frozenset[int] = frozenset()) -> int:
        """Takes a case that was run and returns how many of its keys and arcs are new."""
        keys = keys_of(case)
        new = len(keys - self.keys) + len(arcs - self.arcs)
        self.keys |= keys
        self.arcs |= arcs
        return new
