"""Where the choices of a generator come from: one small interface, so that one generator serves two sources.

Options are ordered from simple to intricate: a source that shrinks moves towards the first option, the smallest number
and "no".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """A source of choices."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        ...

    def chance(self, one_in: int) -> bool:
        """Return True about once in `one_in` times."""
        ...

    def more(self, one_in: int) -> bool:
        """Return whether a list continues: False about once in `one_in` times. The simplest list ends at once."""
        ...

    def pick(self, options: Sequence[T]) -> T:
        """Return one of `options`, with equal probability; the first is the simplest."""
        ...

    def subset(self, count: int, *, sparse: bool) -> int:
        """Return a bit mask over `count` items, each with probability 1/2, or 1/4 if `sparse`."""
        ...


class SeededChoices(Choices):
    """The fast source: a function of its seed alone, on every machine and in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def chance(self, one_in: int) -> bool:
        return self._random.random() * one_in < 1

    def more(self, one_in: int) -> bool:
        return self._random.random() * one_in >= 1

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def subset(self, count: int, *, sparse: bool) -> int:
        mask = self._random.getrandbits(count)
        return mask & self._random.getrandbits(count) if sparse else mask
