"""Judges cases whose ranks were lost, for one case or a batch.

A bad case costs only itself: cases that ranks reported before it are judged, later ones run again on a new world. A death or
a hang must show twice, on other ranks, since the machine may be to blame for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import Case, FailureKind, Judgement, Verdict
from fsdp_testing.judging.judge import lost_ranks
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.ranks.pool import Fate, WorldOutcome


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one world gave.

    Attributes:
        judgements: Judgements of each case that was to run, in order; `incomplete` where a rank reported nothing of it.
        outcome: The fate of the ranks; None where the judge has read that.
    """

    judgements: Sequence[Judgement]
    outcome: WorldOutcome | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Judgements up to the first unfinished case, and the fates that none of them explains."""

    judgements: list[Judgement]
    unexplained: WorldOutcome | None = None


_ONE_AND_ALL = (FailureKind.ONE_RAISED, FailureKind.RAISED)

Run = Callable[[int, int], Attempt]
"""Runs the cases from one place up to another on one world."""


def settle(cases: Sequence[Case], run: Run, *, repeats: bool = True, until: Signature | None = None) -> list[Judgement]:
    """Return a judgement of each case, in order; up to the first one that fails as `until` says.

    Args:
        cases: All need the same number of ranks.
        run: Makes an attempt.
        repeats: A death or a hang must show again; False accepts the first, for runs that decide no verdict.
        until: Stop running on new ranks once a case has failed in this way.
    """
    settled: list[Judgement] = []
    # Unexplained fates of the last round: they count against the first case of the next round, if that case holds on its new
    # ranks.
    lost: WorldOutcome | None = None
    while len(settled) < len(cases):
        start = len(settled)
        part = _read(cases[start:], run(start, len(cases)))
        judgements = part.judgements
        # If not, the rest runs again on a new world, beginning with the unfinished case.
        ended = start + len(judgements) == len(cases)
        if lost is not None and judgements[0].finding is None:
            # Ranks were lost in this case, or by what an earlier one left behind.
            judgements[0] = _different(lost.cause, judgements[0], lost.describe())
        # Only the first time: after a loss this case has already run on new ranks.
        elif lost is None and repeats and judgements[0].loses_ranks:
            judgements[0] = _again(cases[start], judgements[0], run(start, start + 1))
        # Lost after the last report: any case of the batch may have done it.
        if ended and part.unexplained is not None and len(judgements) > 1:
            judgements = _each_alone(cases, start, judgements, part.unexplained, run)
        lost = None if ended else part.unexplained
        settled += judgements
        fails = [index for index, each in enumerate(settled) if until is not None and _looks(each) == until]
        if fails:
            return settled[: fails[0] + 1]
    return settled


def confirmed(first: Judgement, alone: Judgement) -> Judgement:
    """Judge a case that failed in a batch and ran again alone: UNKNOWN if it now holds or fails differently.

    If one rank raised in the batch and every rank raises alone, the failure counts as seen alone: in the batch the others were
    stopped before they reached it.
    """
    looks, again = _looks(first), _looks(alone)
    if looks is not None and again is not None and looks.kind == again.kind:
        return first
    if looks is not None and again is not None and (looks.kind, again.kind) == _ONE_AND_ALL:
        types = [signature.quantity.partition(":")[0] for signature in (looks, again)]
        if types[0] == types[1] and looks.operation == again.operation:
            return alone
    return _different(f"{looks}", alone, first.account)


def _read(cases: Sequence[Case], attempt: Attempt) -> _Part:
    outcome = attempt.outcome
    if outcome is None:
        return _Part(list(attempt.judgements))
    died = any(rank.fate is Fate.DIED for rank in outcome.ranks)
    stopped = _stopped_without_exception(outcome)
    read: list[Judgement] = []
    for case, judgement in zip(cases, attempt.judgements, strict=True):
        # Exceptions of a death's survivors are its echo, whatever their text. So are those of ranks that the pool stopped.
        raised = judgement.finding if judgement.finding and judgement.finding.kind == FailureKind.ONE_RAISED else None
        echo = raised is not None and (died or (bool(raised.ranks) and stopped.issuperset(raised.ranks)))
        unfinished = judgement.incomplete or echo
        if unfinished:
            if read:
                break  # it may be this case or what an earlier one left behind: it goes first in the next attempt
            judgement = lost_ranks(case, outcome)
        if judgement.verdict is not Verdict.PASS and not judgement.only_model_stays and not outcome.ok:
            judgement = replace(judgement, account=outcome.describe())
        read.append(judgement)
        # What comes after it did not run on these ranks, or on ranks whose collectives meet those of another case.
        if unfinished or judgement.loses_ranks or judgement.parted:
            break
    if not _is_unexplained(outcome, read):
        return _Part(read)
    # No other case can have lost them; earlier comparisons still count.
    if len(cases) == 1:
        read = [replace(lost_ranks(cases[0], outcome), tally=read[0].tally, account=outcome.describe())]
    return _Part(read, outcome)


def _stopped_without_exception(outcome: WorldOutcome) -> frozenset[int]:
    """Return the ranks that the pool stopped before any rank had raised: what they say is that their peers are gone."""
    if any(rank.failed or rank.fate is Fate.RAISED for rank in outcome.ranks):
        return frozenset()
    return frozenset(rank.rank for rank in outcome.ranks if rank.fate in (Fate.HUNG, Fate.STOPPED))


def _is_unexplained(outcome: WorldOutcome, read: Sequence[Judgement]) -> bool:
    """Whether ranks were lost, or diverged, although their reports do not show it."""
    if any(rank.fate in (Fate.DIED, Fate.HUNG) for rank in outcome.ranks):
        return not any(judgement.loses_ranks for judgement in read)
    # The last one alone: a case whose ranks cannot go on ends its batch, so ranks that came further parted later.
    return not outcome.ok and (not read or read[-1].verdict is Verdict.PASS or read[-1].only_model_stays)


def _again(case: Case, first: Judgement, attempt: Attempt) -> Judgement:
    """Compare only death or hang: how the other ranks end depends on which one notices first."""
    assert first.finding is not None
    (second,) = _read([case], attempt).judgements
    if second.finding is not None and second.finding.kind == first.finding.kind:
        return first
    return _different(first.finding.explanation, second, first.finding.detail or first.account)


def _each_alone(
    cases: Sequence[Case], start: int, judgements: Sequence[Judgement], lost: WorldOutcome, run: Run
) -> list[Judgement]:
    """Run the cases of a batch one by one after one of them lost ranks after the last report; the guilty case then shows.

    If none does it alone, the guilty case is unknown: the last one stands for all.
    """
    settled, well = list(judgements), True
    for index, first in enumerate(judgements, start):
        attempt = run(index, index + 1)
        (again,) = _read([cases[index]], attempt).judgements
        parted = attempt.outcome is not None and not attempt.outcome.ok
        well = well and not parted
        if again.loses_ranks or (parted and first.finding is None):
            settled[index - start] = again
    if well and settled[-1].finding is None:
        settled[-1] = _different(lost.cause, settled[-1], lost.describe())
    return settled


def _different(first: str, second: Judgement, account: str) -> Judgement:
    """Return UNKNOWN for a case that lost ranks only once."""
    then = second.finding.explanation if second.finding is not None else second.reason or "it held"
    reason = f"this case gives different results: first {first}; then, on other ranks, {then}. Run it again on an idle machine."
    return Judgement(Verdict.UNKNOWN, reason=reason, detail=account, tally=second.tally, account=account)


def _looks(judgement: Judgement) -> Signature | None:
    return signature_of(judgement.finding) if judgement.finding is not None else None
