"""Comparisons with peers: samples that were taken in turns, their ratio with its interval, and curves over a size.

A ratio is the median over rounds in which contender and peer took turns, with the interval that holds the true median in nine
runs of ten. Where that interval is wide, other work on the machine decides, and the interval stands in place of the ratio.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDE = 1.25
"""An interval whose upper end is more than this times its lower end says nothing."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Comparison:
    """Samples of what was measured in one run.

    Attributes:
        name: What was measured, in words.
        unit: Of the samples: "ms", "s", "units".
        samples: By contender and peer, in the order in which they were taken.
        peers: Those that the others are compared with: each with the one of the lowest median.
        curve: Name of the curve that this is a point of; empty if it is none.
        size: Where on it.
        goal: Highest ratio that is promised, by contender.
    """

    name: str
    unit: str
    samples: dict[str, list[float]]
    peers: tuple[str, ...]
    curve: str = ""
    size: float = 0.0
    goal: dict[str, float] | None = None

    @property
    def peer(self) -> str:
        """The peer with the lowest median."""
        return min(self.peers, key=lambda name: statistics.median(self.samples[name]))

    def rows(self) -> list[Row]:
        """Return a row for each name, the contenders first."""
        names = sorted(self.samples, key=lambda name: name in self.peers)
        return [self._row(name) for name in names]

    def _row(self, name: str) -> Row:
        mine, base = self.samples[name], self.samples[self.peer]
        ratio = None if name == self.peer else interval(mine, base)
        return Row(name, min(mine), statistics.median(mine), spread(mine), ratio, (self.goal or {}).get(name))


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: Contender or peer.
        minimum: Of the samples.
        median: Likewise.
        spread: Distance of the quartiles over the median.
        ratio: (lower end, median, upper end); None of the peer itself.
        goal: Highest ratio that is promised.
    """

    name: str
    minimum: float
    median: float
    spread: float
    ratio: tuple[float, float, float] | None
    goal: float | None

    def ratio_text(self) -> str:
        """Return the ratio, or why there is none."""
        if self.ratio is None:
            return "the peer"
        low, middle, high = self.ratio
        if high > WIDE * low:
            return f"the spread is too wide: {low:.2f} to {high:.2f}"
        text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        if self.goal is None:
            return text
        reached = "reached" if high <= self.goal else "missed" if low > self.goal else "open"
        return f"{text}; at most {self.goal:.2f}: {reached}"


def spread(samples: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median; 0 of a single sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle else 0.0


def interval(mine: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median ratio between the ends of its interval.

    Samples of equal number took turns: their ratios are taken pair by pair, so that what slows a round slows both.
    Others are drawn again, each by itself.
    """
    if len(mine) == len(base):
        ratios = sorted(a / b for a, b in zip(mine, base, strict=True))
        low = _rank_below(len(ratios))
        return ratios[low], statistics.median(ratios), ratios[-1 - low]
    luck = random.Random(0)
    drawn = sorted(_drawn_median(mine, luck) / _drawn_median(base, luck) for _ in range(RESAMPLES))
    return drawn[RESAMPLES // 20], statistics.median(mine) / statistics.median(base), drawn[-1 - RESAMPLES // 20]


def _rank_below(count: int) -> int:
    """Return the place in a sorted list below which the true median lies in at most one run of twenty."""
    total, below = 0.0, 0
    while below <= count // 2:
        total += math.comb(count, below) / 2**count
        if total > 0.05:
            break
        below += 1
    return max(0, below - 1)


def _drawn_median(samples: Sequence[float], luck: random.Random) -> float:
    return statistics.median(luck.choices(samples, k=len(samples)))


def exponent(points: Iterable[tuple[float, float]]) -> float:
    """Return k of the power law `cost = c * size ** k` that fits best (least squares of logarithms).

    Raises:
        ValueError: There are fewer than two sizes.
    """
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    if len({size for size, _ in logs}) < 2:
        raise ValueError("exponent: expected at least two sizes, got fewer. Measure another size.")
    middle, centre = (statistics.fmean(column) for column in zip(*logs, strict=True))
    along = sum((size - middle) ** 2 for size, _ in logs)
    return sum((size - middle) * (cost - centre) for size, cost in logs) / along
