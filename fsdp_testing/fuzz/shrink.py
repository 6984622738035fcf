"""What is the simplest case that still fails in the same way?

Greedy delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002) over the parts
of a case, several attempts in one batch: the first one that keeps the signature is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from fsdp_testing.fuzz import reductions
from fsdp_testing.fuzz.batch import Watch
from fsdp_testing.fuzz.lane import Lane
from fsdp_testing.fuzz.signature import Signature
from fsdp_testing.records import Case

SECONDS = 20.0
_AT_ONCE = 6
_KINDS: tuple[Callable[[Case], Iterator[Case]], ...] = (
    reductions.leaps,
    reductions.programs,
    reductions.settings,
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
        start = time.monotonic()
        seen: set[str] = {case.to_json()}
        attempts = 0
        at_once = 1 if signature.kind in ("one_raised", "died", "hung", "desynchronised") else _AT_ONCE
        changed = True
        while changed:
            changed = False
            for kind in _KINDS:
                progress = True
                while progress:
                    progress = False
                    candidates = self._candidates(kind(case), seen, case)
                    while batch := list(islice(candidates, at_once)):
                        if time.monotonic() - start > self._seconds:
                            return Shrunk(case, signature, attempts, time.monotonic() - start, complete=False)
                        attempts += len(batch)
                        better = self._first_that_keeps(batch, signature)
                        if better is not None:
                            case, progress, changed = better, True, True
                            break
        return Shrunk(case, signature, attempts, time.monotonic() - start, complete=True)

    def _candidates(self, drawn: Iterator[Case], seen: set[str], case: Case) -> Iterator[Case]:
        for candidate in drawn:
            shaped = self._shape(candidate)
            document = shaped.to_json()
            if document not in seen and shaped.program and self._fair(shaped):
                seen.add(document)
                yield shaped

    def _first_that_keeps(self, batch: list[Case], signature: Signature) -> Case | None:
        sizes = {case.world.size for case in batch}
        results = [
            result
            for size in sorted(sizes)
            for result in self._lane.run([case for case in batch if case.world.size == size], Watch(operations=True))
        ]
        kept = [result.case for result in results if result.note.signature == signature]
        return next((case for case in batch if case in kept), None)
