"""What becomes of a suspect? It runs alone, is compared with what is known, and is shrunk if it is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_testing.campaign.batch import Watch
from fsdp_testing.campaign.lane import CaseResult, Lane
from fsdp_testing.findings.discovery import Discovery
from fsdp_testing.findings.known import KnownFailures, Rule
from fsdp_testing.judging.signature import Signature
from fsdp_testing.records import Case
from fsdp_testing.shrinking.shrink import Shrinker


@dataclass(frozen=True, slots=True)
class Investigated:
    """What was made of a suspect: a discovery, a known failure, or neither.

    Attributes:
        signature: What it looked like among other cases.
        discovery: What it is; not confirmed if it passes alone.
        known: The known failure that it is.
    """

    signature: Signature
    discovery: Discovery | None = None
    known: Rule | None = None


@dataclass(frozen=True, slots=True)
class Investigator:
    """Confirms and shrinks suspects of one campaign.

    Attributes:
        name: The implementation.
        shape: Gives the legal case nearest to a reduced one.
        fair: Whether the implementation may be asked a case.
        seconds: Time for shrinking one.
    """

    name: str
    shape: Callable[[Case], Case]
    fair: Callable[[Case], bool]
    seconds: float

    def investigate(self, lane: Lane, suspect: CaseResult, known: KnownFailures) -> Investigated | None:
        """Return what a suspect is; None if nothing can be said of it alone.

        Args:
            lane: Runs the attempts.
            suspect: A result with a signature.
            known: What is known by now.
        """
        looks = suspect.note.signature
        if looks is None:
            return None
        watch = Watch(operations=True, models=suspect.note.status == "leaked")
        alone = lane.run([suspect.case], watch)[0]
        signature = alone.note.signature
        if signature is None:
            if alone.note.status != "passed":
                return None
            once = Discovery(self.name, looks, suspect.case, suspect.case, suspect.note.reason, suspect.account, False)
            return Investigated(looks, once)
        rule = known.recognize(signature, suspect.case)
        if rule is not None:
            return Investigated(looks, known=rule)
        shrunk = Shrinker(lane, self.shape, self.fair, self.seconds).shrink(suspect.case, signature)
        last = lane.run([shrunk.case], watch)[0]
        confirmed = last.note.signature == signature
        kept = last if confirmed else alone
        found = Discovery(
            self.name,
            signature,
            suspect.case,
            kept.case,
            kept.note.reason,
            kept.account,
            confirmed,
            shrunk.attempts,
            shrunk.seconds,
        )
        # While it shrank it may have turned into what is known already.
        return Investigated(looks, found, known.recognize(signature, kept.case) if confirmed else None)
