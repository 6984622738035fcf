"""The trace of an implementation's units in one short run, ready to be drawn.

Times are seconds since the first event of any rank, on a clock that the ranks share. Spans are half-open. A portrait
decides nothing: verdicts come from checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records.case import Case

LANES = ("forward", "backward", "collective", "wait", "gathered", "operation")
"""Meaning of a stretch: computing forward or backward in a unit, a collective from its issue until it is done, waiting
for other ranks, a unit holding its full parameters, an operation of the program."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Something that lasted.

    Attributes:
        lane: One of `LANES`.
        start: Seconds, inclusive.
        stop: Seconds, exclusive.
        what: The unit, the collective, or the operation.
    """

    lane: str
    start: float
    stop: float
    what: str


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """From `time` on this rank holds `amount` bytes of parameters: its shards and the units that are gathered."""

    time: float
    amount: int


@dataclass(frozen=True, slots=True)
class RankPortrait:
    """One rank: what it did, and how much it held."""

    rank: int
    stretches: tuple[Stretch, ...]
    live: tuple[LiveBytes, ...]


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """Elements [start, stop) of a parameter, flattened."""

    fqn: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class UnitPortrait:
    """Where the elements of one unit live.

    Attributes:
        unit: FQN of the unit; the root's is empty.
        elements: Elements of its parameters.
        element_bytes: Size of one.
        held: Spans that each rank holds, in the unit's own order.
    """

    unit: str
    elements: int
    element_bytes: int
    held: tuple[tuple[HeldSpan, ...], ...]

    def shard(self, rank: int) -> int:
        """Elements that `rank` holds."""
        return sum(span.stop - span.start for span in self.held[rank])

    @property
    def longest(self) -> int:
        """Elements of the longest shard."""
        return max(map(self.shard, range(len(self.held))), default=0)

    def padding(self, rank: int) -> int:
        """Elements by which the shard of `rank` is shorter than the longest: the padding of equal shards."""
        return self.longest - self.shard(rank)


@dataclass(frozen=True, slots=True)
class Portrait:
    """One run of one implementation.

    Attributes:
        implementation: Registered name or import string.
        case: The case that ran.
        seconds: Length of the time drawn.
        ranks: Recordings, by rank.
        units: Units in the implementation's own order.
        bound_bytes: How many bytes of parameters the strategy lets a rank hold.
        bound_text: Derivation of that bound.
        remark: The error while it was taken; empty if there was none.
    """

    implementation: str
    case: Case
    seconds: float = 0.0
    ranks: tuple[RankPortrait, ...] = ()
    units: tuple[UnitPortrait, ...] = ()
    bound_bytes: int = 0
    bound_text: str = ""
    remark: str = ""
