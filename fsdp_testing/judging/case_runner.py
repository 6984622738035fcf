"""How does the controller get a case judged? It lends a world, runs the case, asks the oracle, has it judged.

A case that fails, dies or hangs costs its own world only. The oracle's free replays are kept: they are the same for
every implementation, strategy and wrapping.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import (
    LOSES_RANKS,
    Case,
    CaseOutcome,
    CaseRecord,
    FailureKind,
    Finding,
    RankObservation,
    Verdict,
    WorldSpec,
)
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.judging.concurrency import Shared, in_order
from fsdp_testing.judging.judge import Judgement, Review, judge
from fsdp_testing.judging.numbers import Numbers, compare_numbers
from fsdp_testing.oracle import gathered_state, rank_jobs
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.fitting import as_observed, fitted, oracle_view
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.ranks.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.preload import TRAINING
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld
from fsdp_testing.ranks.run import raise_unless_ok

_ORACLE_CACHE = 512
_KEPT = 16

A = TypeVar("A")

LOCATABLE = (FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING)
"""Kinds of findings whose first operation an observation after every operation may show."""

FREE = Comparison()
"""The oracle runs freely and everything is compared."""


@dataclass(frozen=True, slots=True)
class RunMode:
    """How ranks run a case and what it is compared with, for claims that its numbers alone do not decide.

    Attributes:
        job: What ranks run, called like `rank_jobs.run_case`, with `arguments` after its own. It returns an observation,
            of a class of its own where it has more to report.
        arguments: More arguments of `job`.
        expect: What the oracle's process runs, called with the case, whether every operation is observed, and
            `expect_arguments`; None for the oracle's free replay (or the lockstep that the comparison asks for).
        expect_arguments: More arguments of `expect`.
        seen_as: The case as the oracle sees it, where that is another one.
        review: Looks at what the ranks report once the numbers agree.
        kept: A case that ran to its end is not run again for the next check that looks at the same; `arguments` are
            hashable then.
        besides: What changes numbers besides the program, such as "what the user's hook returns"; empty if nothing does.
    """

    job: Callable[..., Any] = rank_jobs.run_case
    arguments: tuple[Any, ...] = ()
    expect: Callable[..., Expectation] | None = None
    expect_arguments: tuple[Any, ...] = ()
    seen_as: Callable[[Case], Case] = field(default=lambda case: case)
    review: Review | None = None
    kept: bool = False
    besides: str = ""


ORDINARY = RunMode()
"""Cases run as they are, and their numbers decide."""


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One case on one implementation: its row of a report, what refutes, and what the ranks reported."""

    outcome: CaseOutcome
    finding: Finding | None = None
    ranks: tuple[RankObservation, ...] = ()


@dataclass(frozen=True, slots=True)
class _Question:
    """One case on one implementation, and how it is judged; its identity is made once, which takes a while."""

    adapter: Adapter
    case: Case
    identity: str
    comparison: Comparison
    mode: RunMode


Answer = tuple[Judgement, tuple[RankObservation, ...]]
"""What one run of a case showed, and what the ranks reported."""


class _Same:
    """Equal to what stands for the very same object, whether that can be compared or not."""

    def __init__(self, whom: object) -> None:
        self._whom = whom

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._whom is self._whom

    def __hash__(self) -> int:
        return id(self._whom)


class _Unjudged(Exception):
    """Nothing can be said of this case; the text says why."""


class CaseRunner:
    """Runs cases on the worlds of one pool; several threads may each have a case judged.

    Args:
        pool: Where worlds come from; the process's own by default.
        timeout: Seconds until a rank counts as hung.
    """

    def __init__(self, pool: Pool | None = None, *, timeout: float = 60.0) -> None:
        self._pool = pool or default_pool()
        self._pool.expect(*TRAINING)
        self._timeout = timeout
        self._expectations: Shared[Expectation] = Shared(_ORACLE_CACHE)
        self._kept: Shared[WorldOutcome] = Shared(_KEPT)
        self._lock = threading.Lock()
        self._busy: set[PooledWorld] = set()
        self._interrupted = False
        self._repeats = True

    def impatient(self, timeout: float) -> CaseRunner:
        """Return a runner on the same worlds that waits at most so long for a rank, and takes one death or hang for one.

        For runs that decide no verdict: a shorter program that hangs is not the failure that is looked for.
        """
        other = copy.copy(self)
        other._timeout = min(timeout, self._timeout)
        other._repeats = False
        return other

    @property
    def pool(self) -> Pool:
        """Where worlds come from."""
        return self._pool

    def judge(
        self,
        implementation: Adapter | str,
        case: Case,
        comparison: Comparison = FREE,
        *,
        closely: bool = False,
        mode: RunMode = ORDINARY,
    ) -> JudgedCase:
        """Run `case` through an implementation (its adapter, or where a name enters the name) and judge it.

        A divergence is run again with an observation after every operation, so that the first operation is named and
        not the next marked point (`closely` does that from the beginning). A death or a hang must repeat: the machine
        may be to blame for one.
        """
        start = time.perf_counter()
        closely = closely or comparison.lockstep
        adapter = registry.adapter_of(implementation)
        case = fitted(case, adapter)
        asked = _Question(adapter, case, case.identity, as_observed(comparison, adapter), mode)
        try:
            found, ranks = self._attempt(asked, observe_all=closely)
            if found.finding is not None and found.finding.kind in LOCATABLE and not closely:
                found, ranks = self._closer(asked, found.finding, (found, ranks))
            elif found.finding is not None and found.finding.kind in LOSES_RANKS and self._repeats:
                self._repeat(asked, found.finding)
        except _Unjudged as reason:
            found, ranks = Judgement(Verdict.UNKNOWN, reason=str(reason)), ()
        except PoolBroken as broken:
            found, ranks = Judgement(Verdict.UNKNOWN, reason=f"the pool was lost: {broken}"), ()
        return JudgedCase(_outcome(asked, found, start), found.finding, ranks)

    def on_ranks(self, function: Callable[..., Any], *args: Any, size: int) -> list[Any]:
        """Call `function(*args)` on a world of the runner's pool; raise `WorldFailed` unless every rank returned."""
        outcome = self._execute(WorldSpec(size), function, args, function.__name__)
        raise_unless_ok(outcome)
        return outcome.values

    def observe(
        self, implementation: Adapter | str, case: Case, *, observe_all: bool = False
    ) -> tuple[RankObservation, ...]:
        """Run `case` and return what each rank reports.

        Raises:
            PoolBroken: The world did not survive; the message is the account of every rank.
        """
        adapter = registry.adapter_of(implementation)
        name = f"{adapter.reference} {case.identity}"
        outcome = self._execute(case.world, rank_jobs.run_case, (adapter, case, observe_all), name)
        found = _observations(outcome)
        if len(found) != case.world.size:
            raise PoolBroken(outcome.describe())
        return found

    def _attempt(self, asked: _Question, *, observe_all: bool) -> Answer:
        case, mode = asked.case, asked.mode
        name = asked.adapter.reference
        arguments = (asked.adapter, case, observe_all, *mode.arguments)

        def run() -> WorldOutcome:
            return self._execute(case.world, mode.job, arguments, f"{name} {asked.identity}")

        # Adapters may share a name: tests load one again after it was changed.
        key = (_Same(asked.adapter), asked.identity, mode.job, mode.arguments, observe_all)
        outcome = self._kept.get(key, run, keep=lambda ran: ran.ok) if mode.kept else run()
        ranks = _observations(outcome)

        def ask(seen: Sequence[RankObservation]) -> Numbers:
            expectation = self._expectation(asked, seen, observe_all=observe_all)
            return compare_numbers(case, expectation, seen, asked.comparison)

        records = [CaseRecord(0, rank, accounts=getattr(rank, "accounts", None)) for rank in ranks]
        return judge(case, records, ask, outcome=outcome, review=mode.review), ranks

    def _closer(self, asked: _Question, finding: Finding, first: Answer) -> Answer:
        """The same divergence, at the operation where it first shows."""
        closer = self._attempt(asked, observe_all=True)
        if closer[0].finding is not None:
            return closer
        if closer[0].verdict is Verdict.UNKNOWN and not closer[0].tally.comparisons:
            raise _Unjudged(_reason(closer[0]))
        note = f"{finding.explanation}; it does not show when every operation is followed by an observation"
        return replace(first[0], finding=replace(finding, explanation=note)), first[1]

    def _repeat(self, asked: _Question, finding: Finding) -> None:
        again, _ = self._attempt(asked, observe_all=asked.comparison.lockstep)
        if again.finding is None or again.finding.kind != finding.kind:
            second = again.reason or "it ran to its end" if again.finding is None else again.finding.explanation
            raise _Unjudged(
                f"this case gives different results: first {finding.explanation}; then {second}. "
                f"Run it again on an idle machine.\n{finding.detail}"
            )

    def _expectation(self, asked: _Question, ranks: Sequence[RankObservation], *, observe_all: bool) -> Expectation:
        mode = asked.mode
        case = mode.seen_as(asked.case)
        if mode.expect is not None:
            return self._ask_oracle(mode.expect, (case, observe_all, *mode.expect_arguments), case)
        if asked.comparison.lockstep:
            return self._ask_oracle(
                rank_jobs.expect_lockstep, (case, asked.adapter, gathered_state.states(ranks)), case
            )
        return self._free_expectation(case, observe_all=observe_all)

    def _free_expectation(self, case: Case, *, observe_all: bool) -> Expectation:
        key = oracle_view(case).identity, observe_all
        return self._expectations.get(key, lambda: self._ask_oracle(rank_jobs.expect_free, (case, observe_all), case))

    def _ask_oracle(self, job: Callable[..., Expectation], arguments: tuple[Any, ...], case: Case) -> Expectation:
        outcome = self._execute(WorldSpec(1), job, arguments, f"oracle {case.identity}")
        if not outcome.ok:
            raise _Unjudged(f"the oracle could not run this case\n{outcome.describe()}")
        expectation = outcome.ranks[0].value
        if not isinstance(expectation, Expectation):
            raise _Unjudged(f"the oracle gave a {type(expectation).__name__}")
        return expectation

    def _execute(self, spec: WorldSpec, job: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> WorldOutcome:
        with self._pool.lend(spec.size, backend=spec.backend) as world:
            try:
                with self._lock:
                    if self._interrupted:
                        raise PoolBroken("the run was interrupted")
                    self._busy.add(world)
                return world.execute(job, arguments, timeout=self._timeout, name=name)
            finally:
                with self._lock:
                    self._busy.discard(world)

    def side_by_side(self, tasks: Sequence[Callable[[], A]], jobs: int) -> Generator[A]:
        """Yield what the tasks return, in their order, with up to `jobs` under way, each on worlds of its own.

        If the iteration ends early, the ranks of tasks under way are ended, and what they ask for later is refused.
        """
        try:
            yield from in_order(tasks, jobs, self._interrupt)
        finally:
            if jobs > 1:  # one job is not interrupted from here, and may itself be a part of one of several
                self._interrupted = False

    def _interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            for world in self._busy:
                world.kill_ranks()


def _observations(outcome: WorldOutcome) -> tuple[RankObservation, ...]:
    """What ranks reported, by rank."""
    found = [rank for rank in outcome.ranks if isinstance(rank.value, RankObservation)]
    return tuple(rank.value for rank in sorted(found, key=lambda rank: rank.rank))


def _reason(found: Judgement) -> str:
    return f"{found.reason}\n{found.detail}".strip()


def _outcome(asked: _Question, found: Judgement, start: float) -> CaseOutcome:
    counted = found.tally if found.verdict is not Verdict.UNKNOWN else Compared()
    return CaseOutcome(
        identity=asked.identity,
        verdict=found.verdict,
        world_size=asked.case.world.size,
        strategy=asked.case.strategy,
        seconds=time.perf_counter() - start,
        worst_ratio=counted.worst_ratio,
        comparisons=counted.comparisons,
        error=_reason(found),
    )
