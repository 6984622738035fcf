"""How does the controller get a case judged? It lends a world, runs the case, asks the oracle, compares.

A case that fails, dies or hangs costs its own world only. The oracle's free replays are kept: they are the same for
every implementation, strategy and wrapping.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_testing.checkers import adoption, parity
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.divergence import Tally
from fsdp_testing.checkers.explain import explain, finding_of, operation_text, raised_finding
from fsdp_testing.checkers.quantities import Expectation
from fsdp_testing.errors import PoolBroken
from fsdp_testing.implementations import registry
from fsdp_testing.pool import Fate, Pool, WorldOutcome, default_pool
from fsdp_testing.programs import jobs
from fsdp_testing.programs.fitting import as_observed, fitted
from fsdp_testing.records import (
    Case,
    CaseOutcome,
    Finding,
    RankObservation,
    Verdict,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.run import raise_unless_ok

_ORACLE_CACHE = 512
_KEPT = 16

LOCATABLE = ("diverged", "disagreed", "missing")
"""Kinds of findings whose first operation an observation after every operation may show."""

MUST_REPEAT = ("died", "hung")
"""Kinds of findings that an overloaded machine can cause: they count if they happen twice."""

FREE = Comparison()
"""The oracle runs freely and everything is compared."""

Review = Callable[[Case, Sequence[RankObservation], Expectation], Finding | None]


@dataclass(frozen=True, slots=True)
class Special:
    """Another way to run a case, for claims that its numbers alone do not decide.

    Attributes:
        job: What ranks run, called like `jobs.run_case`, with `arguments` after its own. It returns an observation,
            of a class of its own where it has more to tell.
        arguments: More arguments of `job`.
        expect: What the oracle's process runs, called with the case, whether every operation is observed, and
            `expect_arguments`; None for the oracle's free replay (or the lockstep that the comparison asks for).
        expect_arguments: More arguments of `expect`.
        seen_as: The case as the oracle sees it, where that is another one.
        review: Looks at what the ranks report once the numbers agree.
        kept: A case that ran to its end is not run again for the next check that looks at the same.
    """

    job: Callable[..., Any] = jobs.run_case
    arguments: tuple[Any, ...] = ()
    expect: Callable[..., Expectation] | None = None
    expect_arguments: tuple[Any, ...] = ()
    seen_as: Callable[[Case], Case] = field(default=lambda case: case)
    review: Review | None = None
    kept: bool = False


ORDINARY = Special()
"""Cases run as they are, and their numbers decide."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of one case on one implementation."""

    outcome: CaseOutcome
    finding: Finding | None = None
    ranks: tuple[RankObservation, ...] = ()


@dataclass(frozen=True, slots=True)
class _Question:
    """One case on one implementation, and how it is judged."""

    name: str
    case: Case
    comparison: Comparison
    special: Special


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run of the case showed."""

    finding: Finding | None
    tally: Tally
    ranks: tuple[RankObservation, ...] = ()


class _Unjudged(Exception):
    """Nothing can be said of this case; the text says why."""


class CaseRunner:
    """Runs cases on the worlds of one pool.

    Args:
        pool: Where worlds come from; the process's own by default.
        timeout: Seconds until a rank counts as hung.
    """

    def __init__(self, pool: Pool | None = None, *, timeout: float = 60.0) -> None:
        self._pool = pool or default_pool()
        self._timeout = timeout
        self._expectations: OrderedDict[str, Expectation] = OrderedDict()
        self._kept: OrderedDict[Any, WorldOutcome] = OrderedDict()

    @property
    def pool(self) -> Pool:
        """Where worlds come from."""
        return self._pool

    def judge(
        self,
        name: str,
        case: Case,
        comparison: Comparison = FREE,
        *,
        closely: bool = False,
        special: Special = ORDINARY,
    ) -> Judgement:
        """Runs `case` through implementation `name` and compares it with the oracle.

        A divergence is looked at again with an observation after every operation, so that the first operation is
        named and not the next marked point (`closely` looks like that from the beginning). A death or a hang must
        repeat: the machine may be to blame for one.
        """
        start = time.perf_counter()
        closely = closely or comparison.lockstep
        adapter = registry.load(name)
        case = fitted(case, adapter)
        asked = _Question(name, case, as_observed(comparison, adapter), special)
        try:
            answer = self._attempt(asked, observe_all=closely)
            if answer.finding is not None and answer.finding.kind in LOCATABLE and not closely:
                answer = self._closer(asked, answer.finding, answer)
            elif answer.finding is not None and answer.finding.kind in MUST_REPEAT:
                self._repeat(asked, answer.finding)
        except _Unjudged as reason:
            return Judgement(_outcome(case, Verdict.UNKNOWN, start, error=str(reason)))
        except PoolBroken as broken:
            return Judgement(_outcome(case, Verdict.UNKNOWN, start, error=f"the pool was lost: {broken}"))
        if answer.finding is None and not answer.tally.comparisons:
            return Judgement(_outcome(case, Verdict.UNKNOWN, start, error="nothing was compared"))
        if answer.finding is None and answer.tally.undecided:
            return Judgement(_outcome(case, Verdict.UNKNOWN, start, error=explain(case, answer.tally.undecided[0], 0)))
        verdict = Verdict.PASS if answer.finding is None else Verdict.FAIL
        return Judgement(_outcome(case, verdict, start, tally=answer.tally), answer.finding, answer.ranks)

    def on_ranks(self, function: Callable[..., Any], *args: Any, size: int) -> list[Any]:
        """Calls `function(*args)` on a world of the runner's pool; raises `WorldFailed` unless every rank returned."""
        outcome = self._execute(WorldSpec(size), function, args, function.__name__)
        raise_unless_ok(outcome)
        return outcome.values

    def observe(self, name: str, case: Case, *, observe_all: bool = False) -> tuple[RankObservation, ...]:
        """Runs `case` and returns what each rank reports.

        Raises:
            PoolBroken: The world did not survive; the message is the account of every rank.
        """
        outcome = self._execute(case.world, jobs.run_case, (name, case, observe_all), f"{name} {case.identity}")
        found = _observations(outcome)
        if len(found) != case.world.size:
            raise PoolBroken(outcome.describe())
        return tuple(found[rank] for rank in sorted(found))

    def _attempt(self, asked: _Question, *, observe_all: bool) -> Answer:
        case, special = asked.case, asked.special
        arguments = (asked.name, case, observe_all, *special.arguments)
        key = (asked.name, case.identity, special.job, observe_all)
        outcome = self._kept.get(key) if special.kept else None
        if outcome is None:
            outcome = self._execute(case.world, special.job, arguments, f"{asked.name} {case.identity}")
        if special.kept and outcome.ok:
            self._kept[key] = outcome
            self._kept.popitem(last=False) if len(self._kept) > _KEPT else None
        found = _observations(outcome)
        errors = {rank: seen.error for rank, seen in found.items() if seen.error is not None}
        innocent = [error for error in errors.values() if error.innocent]
        if innocent:
            raise _Unjudged(f"{innocent[0].type_name}: {innocent[0].message}\n{innocent[0].traceback}")
        if len(found) < case.world.size:
            return Answer(self._lost(case, outcome, errors), Tally())
        ranks = tuple(found[rank] for rank in sorted(found))
        expectation = self._expectation(asked, ranks, observe_all=observe_all)
        tally = self._compare(asked, expectation, ranks)
        if tally.divergences:
            leading = parity.first(tally.divergences)
            return Answer(finding_of(case, leading, len(tally.divergences) - 1), tally, ranks)
        if errors:
            return Answer(raised_finding(case, errors), tally, ranks)
        if not outcome.ok:
            return Answer(_disagreement(case, outcome), tally, ranks)
        finding = special.review(case, ranks, expectation) if special.review is not None else None
        return Answer(finding, tally, ranks)

    def _closer(self, asked: _Question, finding: Finding, answer: Answer) -> Answer:
        """The same divergence, at the operation where it first shows."""
        closer = self._attempt(asked, observe_all=True)
        if closer.finding is not None:
            return closer
        note = f"{finding.explanation}; it does not show when every operation is followed by an observation"
        return replace(answer, finding=replace(finding, explanation=note))

    def _repeat(self, asked: _Question, finding: Finding) -> None:
        again = self._attempt(asked, observe_all=asked.comparison.lockstep).finding
        if again is None or again.kind != finding.kind:
            second = "it ran to its end" if again is None else again.explanation
            raise _Unjudged(
                f"this case gives different results: first {finding.explanation}; then {second}. "
                f"Run it again on an idle machine.\n{finding.detail}"
            )

    def _lost(self, case: Case, outcome: WorldOutcome, errors: dict[int, Any]) -> Finding:
        """The finding for ranks that reported nothing: one raised and the others waited, or they died or hung.

        A death explains what the others raise when their peer is gone; an exception explains why the others wait.
        """
        died = any(rank.fate is Fate.DIED for rank in outcome.ranks)
        if errors and not died:
            return replace(raised_finding(case, errors), detail=outcome.describe())
        raised = [rank for rank in outcome.ranks if rank.fate is Fate.RAISED]
        if raised:
            raise _Unjudged(outcome.describe())
        fate = Fate.DIED if died else Fate.HUNG
        guilty = tuple(rank.rank for rank in outcome.ranks if rank.fate is fate)
        return Finding(
            kind="died" if died else "hung",
            quantity="the run",
            operation=-1,
            operation_text="somewhere in the program",
            ranks=guilty,
            explanation=outcome.cause,
            case=case,
            detail=outcome.describe(),
        )

    def _expectation(self, asked: _Question, ranks: Sequence[RankObservation], *, observe_all: bool) -> Expectation:
        special = asked.special
        case = special.seen_as(asked.case)
        if special.expect is not None:
            return self._ask_oracle(special.expect, (case, observe_all, *special.expect_arguments), case)
        if asked.comparison.lockstep:
            return self._ask_oracle(jobs.expect_lockstep, (case, asked.name, adoption.states(ranks)), case)
        return self._free_expectation(case, observe_all=observe_all)

    def _compare(self, asked: _Question, expectation: Expectation, ranks: Sequence[RankObservation]) -> Tally:
        tally = parity.compare(expectation, ranks, asked.comparison)
        complete = bool(expectation.points) and expectation.points[-1].index == len(asked.case.program)
        if not complete and not tally.divergences and all(rank.error is None for rank in ranks):
            raise _Unjudged("the oracle did not come to the end of this case, and what it saw agrees")
        return tally

    def _free_expectation(self, case: Case, *, observe_all: bool) -> Expectation:
        key = f"{_oracle_view(case).identity}/{observe_all}"
        if key not in self._expectations:
            self._expectations[key] = self._ask_oracle(jobs.expect_free, (case, observe_all), case)
            if len(self._expectations) > _ORACLE_CACHE:
                self._expectations.popitem(last=False)
        self._expectations.move_to_end(key)
        return self._expectations[key]

    def _ask_oracle(self, job: Callable[..., Expectation], arguments: tuple[Any, ...], case: Case) -> Expectation:
        outcome = self._execute(WorldSpec(1), job, arguments, f"oracle {case.identity}")
        if not outcome.ok:
            raise _Unjudged(f"the oracle could not run this case\n{outcome.describe()}")
        expectation = outcome.ranks[0].value
        if not isinstance(expectation, Expectation):
            raise _Unjudged(f"the oracle gave a {type(expectation).__name__}")
        return expectation

    def _execute(self, spec: WorldSpec, job: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> WorldOutcome:
        world = self._pool.world(spec.size, backend=spec.backend)
        try:
            return world.execute(job, arguments, timeout=self._timeout, name=name)
        finally:
            world.release()


def _disagreement(case: Case, outcome: WorldOutcome) -> Finding:
    """The finding for ranks that all returned, and with right numbers, but did not communicate alike."""
    return Finding(
        kind="uncoordinated",
        quantity="collectives",
        operation=len(case.program),
        operation_text=operation_text(case, len(case.program)),
        ranks=tuple(range(case.world.size)),
        explanation=outcome.cause,
        case=case,
        detail=outcome.describe(),
    )


def _observations(outcome: WorldOutcome) -> dict[int, RankObservation]:
    return {rank.rank: rank.value for rank in outcome.ranks if isinstance(rank.value, RankObservation)}


def _oracle_view(case: Case) -> Case:
    """What the oracle's free replay depends on; it knows no strategy, wrapping or offload."""
    world = WorldSpec(case.world.size)
    return replace(case, world=world, strategy="no_shard", wrapping=WrappingPlan(), cpu_offload=False)


def _outcome(case: Case, verdict: Verdict, start: float, *, tally: Tally | None = None, error: str = "") -> CaseOutcome:
    counted = tally or Tally()
    return CaseOutcome(
        identity=case.identity,
        verdict=verdict,
        world_size=case.world.size,
        strategy=case.strategy,
        seconds=time.perf_counter() - start,
        worst_ratio=counted.worst_ratio,
        comparisons=counted.comparisons,
        error=error,
    )
