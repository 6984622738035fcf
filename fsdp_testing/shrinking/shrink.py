"""What is the simplest case that still fails in the same way?

First much simpler cases are asked outright (`cores`). Then delta debugging (Zeller and Hildebrandt, "Simplifying and
Isolating Failure-Inducing Input", 2002) over the parts of what is left, with one change: every single part is left out
in an attempt of its own, many in one batch, and then all of those that nothing depended on are left out together, or
half of them, and so on. A failure that needs a fixed set of parts is down to it after two batches.

A failure that costs the ranks is met as rarely as possible: the boldest candidate first, one after the other, up to the
first that keeps the signature. What passes costs nothing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from fsdp_testing.campaign.batch import Watch
from fsdp_testing.campaign.lane import CaseResult, Lane
from fsdp_testing.judging.signature import Signature
from fsdp_testing.records import ENDS_RANKS, Case, FailureKind
from fsdp_testing.shrinking import reductions
from fsdp_testing.shrinking.minimal_candidates import barest, beginnings, cores, every_core, leaps
from fsdp_testing.shrinking.reductions import Kind, Step, joined

SECONDS = 20.0
_AT_ONCE = 12
_HUNG_SECONDS = 5.0
"""When a case counts as hung while it shrinks; what is left in the end is confirmed with the deadline of the campaign."""
_KINDS: tuple[Kind, ...] = (
    reductions.deletions,
    reductions.pairs,
    reductions.settings,
    reductions.cuts,
    reductions.trees,
    reductions.operations,
)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What shrinking gave.

    Attributes:
        case: The simplest case found.
        signature: Its signature, equal to the one that was kept.
        attempts: Number of cases run.
        seconds: Time taken.
        complete: No reduction is left that keeps the signature; else the time was up.
    """

    case: Case
    signature: Signature
    attempts: int
    seconds: float
    complete: bool


class Shrinker:
    """Shrinks cases on one lane.

    Args:
        lane: Runs the attempts.
        shape: Gives the legal case nearest to a reduced one.
        fair: Whether an implementation may be asked a case at all.
        seconds: When to be content with what was found.
    """

    def __init__(
        self, lane: Lane, shape: Callable[[Case], Case], fair: Callable[[Case], bool], seconds: float = SECONDS
    ) -> None:
        self._lane = lane
        self._shape = shape
        self._fair = fair
        self._seconds = seconds

    def signature_of(self, case: Case) -> Signature | None:
        """Runs one case alone and returns how it fails, or None if it does not."""
        return self._lane.run([case], Watch(operations=True))[0].note.signature

    def shrink(self, case: Case, signature: Signature) -> Shrunk:
        """Returns the simplest case found that fails with `signature`, as `case` does."""
        search = _Search(self._lane, self._shape, self._fair, case, signature, time.monotonic() + self._seconds)
        start = time.monotonic()
        complete = True
        try:
            search.run()
        except _TimeIsUp:
            complete = False
        return Shrunk(search.case, signature, search.attempts, time.monotonic() - start, complete)


class _TimeIsUp(Exception):
    """Nothing more is to be tried."""


class _Search:
    """One search, with what it has found so far.

    Args:
        lane: Runs the attempts.
        shape: As for `Shrinker`.
        fair: As for `Shrinker`.
        case: Where to start.
        signature: What must be kept.
        limit: When to end, by the monotonic clock.
    """

    def __init__(
        self,
        lane: Lane,
        shape: Callable[[Case], Case],
        fair: Callable[[Case], bool],
        case: Case,
        signature: Signature,
        limit: float,
    ) -> None:
        self.case = case
        self.attempts = 0
        self._lane = lane
        self._shape = shape
        self._fair = fair
        self._signature = signature
        self._limit = limit
        self._ending = signature.kind in ENDS_RANKS
        self._seen = {case.to_json()}

    def run(self) -> None:
        """Simplifies `self.case` until nothing simpler keeps the signature.

        Raises:
            _TimeIsUp: The limit has passed; `self.case` is the best so far.
        """
        self._take_first(leaps(self.case))
        if self._ending:
            self._take_first(every_core(self.case, self._signature))
            self._take_first([barest(self.case)])
        self._take_first(beginnings(self.case, self._signature))
        self._take_first(cores(self.case))
        before = None
        while before != self.case:
            before = self.case
            for kind in _KINDS:
                while self._take_steps(kind):
                    pass

    def _take_first(self, candidates: Iterable[Case]) -> bool:
        """Takes the first candidate that keeps the signature; tells whether there was one."""
        fresh = self._fresh(candidates)
        while batch := list(islice(fresh, _AT_ONCE)):
            kept = self._keeping(batch)
            if kept:
                self.case = kept[0]
                return True
        return False

    def _take_steps(self, kind: Kind) -> bool:
        """Takes steps of one kind, as many as can be taken together; tells whether there was any."""
        steps = list(kind(self.case))
        if self._ending:
            return self._take_first(joined(kind, self.case, [step.key for step in part]) for part in _parts(steps, 1))
        chunks = (steps[place : place + _AT_ONCE] for place in range(0, len(steps), _AT_ONCE))
        return any(self._take_of_chunk(kind, chunk) for chunk in chunks)

    def _take_of_chunk(self, kind: Kind, steps: list[Step]) -> bool:
        shaped = {step.key: self._shape(step.case) for step in steps}
        kept = self._keeping(list(self._fresh(shaped.values())))
        if not kept:
            return False
        taken = [step for step in steps if shaped[step.key] in kept]
        together = [joined(kind, self.case, [step.key for step in part]) for part in _parts(taken, 2)]
        self.case = kept[0]
        self._take_first(together)
        return True

    def _fresh(self, candidates: Iterable[Case]) -> Iterator[Case]:
        """The candidates as legal cases, without those that were tried, are empty, or may not be asked."""
        for candidate in candidates:
            shaped = self._shape(candidate)
            document = shaped.to_json()
            if document not in self._seen and shaped.program and self._fair(shaped):
                self._seen.add(document)
                yield shaped

    def _keeping(self, batch: list[Case]) -> list[Case]:
        """Runs cases and returns those that keep the signature, in the same order."""
        if not batch:
            return []
        if time.monotonic() > self._limit:
            raise _TimeIsUp
        kept: list[Case] = []
        for size in sorted({case.world.size for case in batch}):
            results = self._results([case for case in batch if case.world.size == size])
            self.attempts += len(results)
            kept += [result.case for result in results if result.note.signature == self._signature]
        return [case for case in batch if case in kept]

    def _results(self, cases: list[Case]) -> list[CaseResult]:
        until = self._signature if self._ending else None
        deadline = _HUNG_SECONDS if self._signature.kind == FailureKind.HUNG else None
        return self._lane.run(cases, Watch(operations=True), until=until, deadline=deadline)


def _parts(steps: list[Step], smallest: int) -> Iterator[list[Step]]:
    """All steps, each half of them, each quarter, ... down to stretches of `smallest`."""
    size = len(steps)
    while size >= smallest:
        yield from (steps[place : place + size] for place in range(0, len(steps), size))
        size = (size + 1) // 2 if size > 1 else 0
