"""Decides what one case shows about an implementation, whether a check, a campaign or a certificate ran it.

Three-valued: `PASS` needs something that was compared and found right, `FAIL` a fact that refutes, and everything else is
`UNKNOWN`. What was not observed (`None` in a record) is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdp_testing.cases.records import (
    OUTLIVES,
    Case,
    CaseRecord,
    FailureKind,
    Finding,
    Judgement,
    RaisedError,
    RankObservation,
    Verdict,
)
from fsdp_testing.judging.checkers import agreement, overruns
from fsdp_testing.judging.checkers.explain import explain, finding, finding_of, overrun_finding, raised_finding
from fsdp_testing.judging.checkers.overruns import budget_of
from fsdp_testing.judging.numbers import Numbers
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.ranks.pool import Fate, WorldOutcome
from fsdp_testing.ranks.pool.cause import Diverged, Refused, Stuck

_RANKS_DISAGREE = (Stuck, Diverged, Refused)

AskOracle = Callable[[Sequence[RankObservation]], Numbers]
"""Compares what all ranks report with the oracle, which runs only if there is something to compare."""

Review = Callable[[Case, Sequence[RankObservation], Expectation], Finding | None]
"""A rule of one check: looks at what the ranks report once the numbers agree."""


def judge(
    case: Case,
    records: Sequence[CaseRecord],
    ask: AskOracle,
    *,
    outcome: WorldOutcome | None = None,
    review: Review | None = None,
) -> Judgement:
    """Return what the records of all ranks say, by the first of these that applies.

    1. The harness or the adapter raised: no verdict on the implementation.
    2. Ranks did not report: a process died, a rank raised and the others waited, or a process hung.
    3. Numbers diverge from the oracle's; what is raised or broken later is a consequence.
    4. Ranks raised.
    5. Ranks issued different collectives.
    6. An operation takes more memory or communication than the strategy promises.
    7. A rule of the check's own is broken.
    8. State of the process was left changed.
    9. Nothing refutes, and the numbers decide nothing: unknown.
    10. All is right, but the model outlives its case.

    Args:
        case: The case as the implementation ran it.
        records: Records of every rank that reported, by rank.
        ask: Compares the numbers.
        outcome: The fate of the ranks, if the case was run alone.
        review: The check's own rule.
    """
    ranks = [record.observation for record in records]
    errors = {rank.rank: rank.error for rank in ranks if rank.error is not None}
    # First: results of a broken harness or adapter show nothing about the implementation.
    fault = next((error for error in errors.values() if error.not_implementation_fault), None)
    if fault is not None:
        return Judgement(Verdict.UNKNOWN, reason=f"{fault.type_name}: {fault.message.strip()}", detail=fault.traceback)
    # Before the numbers, which need every rank's report.
    if len(records) < case.world.size:
        return _incomplete(case, errors, outcome)
    numbers, uncoordinated = ask(ranks), _uncoordinated(case, records, outcome)
    # In the order above: `or` ends at the first fact that refutes, and later ones may follow from it.
    refutation = (
        _diverged(case, numbers)
        or (raised_finding(case, errors) if errors else None)
        or uncoordinated
        or _overrun(case, records)
        or (
            review(case, ranks, numbers.expectation) if review and numbers.expectation and not numbers.problem else None
        )
        or _left_behind(case, records)
    )
    if refutation is None:
        return replace(_undecided(case, numbers) or _kept_model(case, records, numbers), tally=numbers.tally.tally)
    return Judgement(Verdict.FAIL, refutation, tally=numbers.tally.tally, parted=uncoordinated is not None)


def lost_ranks(case: Case, outcome: WorldOutcome) -> Judgement:
    """Return what follows from the fates of ranks that did not report.

    A death explains what the others raise when their peer is gone. Without a death, an exception outside the program shows
    nothing about the implementation. A rank that was stopped in a collective that an ended peer never joined would have
    waited forever; so would one whose peer issued another collective, be it in a later case.
    """
    fates = [rank.fate for rank in outcome.ranks]
    # A death first: it explains exceptions; and exceptions explain waits.
    fate = next((candidate for candidate in (Fate.DIED, Fate.RAISED, Fate.HUNG) if candidate in fates), None)
    if fate is None and isinstance(outcome.diagnosis, _RANKS_DISAGREE):
        return Judgement(Verdict.FAIL, _different_collectives(case, outcome.cause, outcome.describe()))
    # Neither dead nor hung: code outside the program raised, which shows nothing about the implementation.
    if outcome.ok or fate not in (Fate.DIED, Fate.HUNG):
        why = outcome.cause or "a rank did not report it"
        return Judgement(Verdict.UNKNOWN, reason=why, detail=outcome.describe())
    lost = [rank for rank in outcome.ranks if rank.fate is fate]
    how = next(
        (candidate.signal_name or f"exit code {candidate.exit_code}" for candidate in lost if fate is Fate.DIED), ""
    )
    loss = Finding(
        kind=FailureKind.DIED if fate is Fate.DIED else FailureKind.HUNG,
        quantity="the run",
        operation=-1,
        operation_text="somewhere in the program",
        ranks=tuple(rank.rank for rank in lost),
        explanation=outcome.cause,
        case=case,
        detail=outcome.describe(),
        statement=outcome.cause,
        message=how,
    )
    return Judgement(Verdict.FAIL, loss)


def _incomplete(case: Case, errors: Mapping[int, RaisedError], outcome: WorldOutcome | None) -> Judgement:
    """An exception explains why the others wait, and a death what the others raise."""
    # With a death among the fates, exceptions are what survivors say of a peer that is gone.
    died = outcome is not None and any(rank.fate is Fate.DIED for rank in outcome.ranks)
    if errors and not died:
        raised = raised_finding(case, errors)
        raised = replace(raised, detail=outcome.describe()) if outcome is not None else raised
        return Judgement(Verdict.FAIL, raised)
    if outcome is not None:
        return lost_ranks(case, outcome)
    return Judgement(Verdict.UNKNOWN, reason="not every rank reported", incomplete=True)


def _diverged(case: Case, numbers: Numbers) -> Finding | None:
    if numbers.finding is not None:
        return numbers.finding
    divergences = numbers.tally.divergences
    if not divergences or numbers.problem:
        return None
    return finding_of(case, agreement.first(divergences), divergences)


def _uncoordinated(case: Case, records: Sequence[CaseRecord], outcome: WorldOutcome | None) -> Finding | None:
    """Return the finding that ranks issued different collectives: by the ledger's account, else by each rank's own digests."""
    statement, detail = "", ""
    if outcome is not None and not outcome.ok:
        statement, detail = outcome.cause, outcome.describe()
    else:
        counted = {record.observation.rank: record.collectives for record in records if record.collectives is not None}
        members = {key: ranks for record in records for key, ranks in record.groups.items()}
        nothing = (0, 0)
        # By group: ranks that are in different groups issue different collectives.
        for key in {key for counts in counted.values() for key in counts}:
            # A member that did not use a group at all issued nothing in it.
            ranks = [rank for rank, counts in counted.items() if key in counts or rank in members.get(key, ())]
            if len({counted[rank].get(key, nothing) for rank in ranks}) > 1:
                statement = "the ranks did not issue the same collectives"
    return _different_collectives(case, statement, detail) if statement else None


def _different_collectives(case: Case, statement: str, detail: str) -> Finding:
    everyone = tuple(range(case.world.size))
    kind, end = FailureKind.UNCOORDINATED, len(case.program)
    return finding(case, kind, "collectives", end, statement, ranks=everyone, detail=detail)


def _overrun(case: Case, records: Sequence[CaseRecord]) -> Finding | None:
    accounts = [record.accounts for record in records if record.accounts is not None]
    overrun = overruns.first_overrun(case, accounts, budget_of(case)) if len(accounts) == len(records) else None
    return None if overrun is None else overrun_finding(case, overrun)


def _left_behind(case: Case, records: Sequence[CaseRecord]) -> Finding | None:
    leaks = [(leak, record.observation.rank) for record in records for leak in record.leaks if leak != OUTLIVES]
    return _leaked(case, *leaks[0], sort=leaks[0][0].split(":")[0]) if leaks else None


def _leaked(case: Case, leak: str, rank: int, *, sort: str) -> Finding:
    end, statement = len(case.program), f"left behind: {leak}"
    return finding(case, FailureKind.LEAKED, sort, end, statement, ranks=(rank,), sort=sort)


def _undecided(case: Case, numbers: Numbers) -> Judgement | None:
    """Reason for no verdict although nothing refutes."""
    # The oracle's own problem comes first: it may be why nothing was compared.
    reason = numbers.problem
    if not reason and not numbers.tally.comparisons:
        reason = "nothing was compared"
    if not reason and numbers.tally.undecided:
        reason = explain(case, numbers.tally.undecided[0], 0)
    return Judgement(Verdict.UNKNOWN, reason=reason) if reason else None


def _kept_model(case: Case, records: Sequence[CaseRecord], numbers: Numbers) -> Judgement:
    """Everything is right; whether the model leaks is checked last, because the numbers stand."""
    ranks = [record.observation.rank for record in records if OUTLIVES in record.leaks]
    if ranks:
        return Judgement(Verdict.FAIL, _leaked(case, OUTLIVES, ranks[0], sort="model"))
    return Judgement(Verdict.PASS, fast=numbers.fast)
