"""What becomes of a suspect? It runs alone, is compared with what is known, and is shrunk if it is new."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fsdp_testing.cases.records import ENDS_RANKS, Case, FailureKind
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.known import KnownFailures, Rule
from fsdp_testing.errors import HarnessError
from fsdp_testing.explain.inquiry import WRONG_NUMBERS
from fsdp_testing.explain.root_causes import cause_of
from fsdp_testing.explain.shrinking.shrink import Attempt, shrink
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.signature import Signature
from fsdp_testing.search.campaign.batch import Watch
from fsdp_testing.search.campaign.lane import CaseResult, Lane

_HUNG_SECONDS = 5.0
"""When a case counts as hung while it shrinks; what is left in the end is confirmed with the deadline of the campaign."""


def attempts_on(lane: Lane) -> Attempt:
    """Return what runs the attempts of shrinking on a lane."""

    def attempt(cases: Sequence[Case], wanted: Signature) -> list[tuple[Case, Signature | None]]:
        until = wanted if wanted.kind in ENDS_RANKS else None
        deadline = _HUNG_SECONDS if wanted.kind == FailureKind.HUNG else None
        results = lane.run(cases, Watch(operations=True), until=until, deadline=deadline)
        return [(result.case, result.note.signature) for result in results]

    return attempt


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
        """Return what a suspect is; None if it cannot be judged alone.

        Args:
            lane: Runs the attempts.
            suspect: A result with a signature.
            known: What is known by now.
        """
        met_as = suspect.note.signature
        if met_as is None:
            return None
        watch = Watch(operations=True, models=suspect.note.status == "leaked")
        alone = lane.run([suspect.case], watch)[0]
        signature = alone.note.signature
        if signature is None:
            if alone.note.status != "passed":
                return None
            once = Discovery(self.name, met_as, suspect.case, suspect.case, suspect.note.reason, suspect.account, False)
            return Investigated(met_as, once)
        rule = self._recognized(lane, alone, known)
        if rule is not None:
            return Investigated(met_as, known=rule)
        shrunk = shrink(suspect.case, signature, attempts_on(lane), self.shape, self.fair, self.seconds)
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
            kept.note.overrun,
            self._cause(lane, kept.case) if confirmed and signature.kind in WRONG_NUMBERS else "",
        )
        # While it shrank it may have turned into what is known already.
        cause = kept.note.cause if kept.note.cause is not None else found.cause
        again = known.recognize(signature, kept.case, kept.note.at, cause, kept.note.units) if confirmed else None
        return Investigated(met_as, found, again)

    def _recognized(self, lane: Lane, alone: CaseResult, known: KnownFailures) -> Rule | None:
        """The rule that knows a failure, by its cause where the rule names one."""
        signature, at, units = alone.note.signature, alone.note.at, alone.note.units
        assert signature is not None
        rule = known.recognize(signature, alone.case, at, alone.note.cause, units)
        if rule is None or alone.note.cause is not None or not rule.asks_cause(signature):
            return rule
        return known.recognize(signature, alone.case, at, self._cause(lane, alone.case), units)

    def _cause(self, lane: Lane, case: Case) -> str:
        """What the wrong numbers are equal to; a world that is lost on the way leaves it unknown."""
        try:
            with suppress(HarnessError):
                return cause_of(CaseRunner(lane.pool), self.name, case)
        except Exception as error:  # noqa: BLE001 - a campaign of an hour must not be lost over an explanation
            why = f"{self.name}: a finding is not explained: {type(error).__name__}: {error}"
            warnings.warn(why, RuntimeWarning, stacklevel=2)
        return ""
