"""Gets a case judged, or a batch: lends a world, runs it, asks the oracle, has it judged.

A case that fails, dies or hangs costs only its own world; `attempts` decides what follows from lost ranks. The oracle's free
replays are kept: they are the same for every implementation, strategy and wrapping.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import (
    NOTHING_COMPARED,
    Case,
    CaseOutcome,
    CaseRecord,
    FailureKind,
    Finding,
    Judgement,
    RankObservation,
    Verdict,
    WorldSpec,
)
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.attempts import Attempt, settle
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.batch_judge import attempt_batch
from fsdp_testing.judging.judge import Review, judge
from fsdp_testing.judging.known import CaseFeatures, features_of
from fsdp_testing.judging.numbers import Numbers, compare_numbers
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.judging.worlds import Same, Shared, Worlds
from fsdp_testing.oracle import assemble, rank_jobs
from fsdp_testing.oracle.kept_groups import KeptGroups, groups_of
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.setup import as_observed, fitted, oracle_view
from fsdp_testing.ranks.faults.fault import Fault, check_together
from fsdp_testing.ranks.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.ranks.run import raise_unless_ok, run_with_faults

_ORACLE_CACHE = 4096
"""All of one implementation's checks, so that the next one finds them; some 30 KB each."""
_KEPT = 16
_IN_RANKS = (rank_jobs.__name__, registry.__name__)
"""What each rank runs that is judged: this process has it already, so that it changes no more, and it is imported once ahead
of all ranks, not again in each."""

A = TypeVar("A")

LOCATABLE = (FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING)
"""Kinds of findings whose first operation an observation after every operation may show."""

FREE = Comparison()
"""The oracle runs freely and everything is compared."""


@dataclass(frozen=True, slots=True)
class RunMode:
    """How ranks run a case and its reference, for claims that its numbers alone do not decide.

    Attributes:
        job: What ranks run, called like `rank_jobs.run_case`, with `arguments` after its own. It returns an observation,
            of a class of its own where it has more to report.
        arguments: More arguments of `job`.
        expect: What the oracle's process runs, called with the case, whether every operation is observed, and
            `expect_arguments`; None for the oracle's free replay (or the lockstep that the comparison asks for).
        expect_arguments: More arguments of `expect`.
        seen_as: The case as the oracle sees it, if different.
        review: Looks at what the ranks report once the numbers agree.
        kept: A case that ran to its end is not run again for the next check that looks at the same; `arguments` are
            hashable then.
        besides: Other influences on the numbers than the program, such as "what the user's hook returns"; empty if none.
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
    """One case on one implementation, and what is known of it.

    Attributes:
        case: As it was asked.
        judgement: The judgement.
        ranks: The ranks' reports, where the case ran by itself.
        seconds: Wall time spent, likewise.
    """

    case: Case
    judgement: Judgement
    ranks: tuple[RankObservation, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def finding(self) -> Finding | None:
        """Return the finding that refutes the claim; None if there is none."""
        return self.judgement.finding

    @property
    def signature(self) -> Signature | None:
        """Return the failure's signature; None without a failure."""
        return signature_of(self.finding) if self.finding is not None else None

    @property
    def features(self) -> CaseFeatures:
        """Return the features that rules of known failures match: the case in words, and the operation at which it fails."""
        return CaseFeatures(self.case) if self.finding is None else features_of(self.finding)

    @property
    def outcome(self) -> CaseOutcome:
        """Return its row of a report."""
        tally = self.judgement.tally if self.verdict is not Verdict.UNKNOWN else NOTHING_COMPARED
        return CaseOutcome(
            identity=self.case.identity,
            verdict=self.verdict,
            world_size=self.case.world.size,
            strategy=self.case.strategy,
            seconds=self.seconds,
            worst_ratio=tally.worst_ratio,
            comparisons=tally.comparisons,
            error=_reason(self.judgement),
        )


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


class _Unjudged(Exception):
    """No verdict on this case; the text says why."""


class CaseRunner:
    """Runs cases on the worlds of one pool; several threads may judge cases at the same time.

    Args:
        pool: The pool that lends worlds; the process's own by default.
        timeout: Seconds until a rank counts as hung.
        faults: Injected into the ranks in each run of a case; one that is not reached leaves it unknown.
    """

    def __init__(self, pool: Pool | None = None, *, timeout: float = 60.0, faults: Sequence[Fault] = ()) -> None:
        self.worlds = Worlds(pool or default_pool())
        self.pool.expect(*_IN_RANKS)
        self._timeout = timeout
        self._faults = tuple(faults)
        check_together(self._faults)
        self._expectations: Shared[Expectation] = Shared(_ORACLE_CACHE)
        self._kept: Shared[WorldOutcome] = Shared(_KEPT)
        self._repeats = True

    def impatient(self, timeout: float | None = None) -> CaseRunner:
        """Return a runner on the same worlds with this timeout, for which one death or hang is enough.

        For runs that decide no verdict: a shorter program that hangs does not show the failure sought.
        """
        # A copy, which shares worlds and caches.
        runner = copy.copy(self)
        runner._timeout = self._timeout if timeout is None else min(timeout, self._timeout)
        runner._repeats = False
        return runner

    @property
    def pool(self) -> Pool:
        return self.worlds.pool

    def _adapter_of(self, implementation: Adapter | str) -> Adapter:
        adapter = registry.adapter_of(implementation)
        # Not users' modules: their import may start threads or a device, after which no rank can be forked.
        if adapter.reference in registry.BUILT_IN:
            self.pool.expect(*registry.modules_of(adapter.reference))
        return adapter

    def judge(
        self,
        implementation: Adapter | str,
        case: Case,
        comparison: Comparison = FREE,
        *,
        closely: bool = False,
        mode: RunMode = ORDINARY,
    ) -> JudgedCase:
        """Run `case` on an implementation (its adapter or name) and judge it.

        A divergence runs again with an observation after every operation, to name the first operation that diverges instead
        of the next observed one (`closely` does that from the beginning). A death or a hang must repeat: a single one may be
        the machine's fault.
        """
        start = time.perf_counter()
        # In lockstep the oracle begins each operation with the state after the one before.
        closely = closely or comparison.lockstep
        # Fitted before the identity is taken: runs of the same fitted case share caches.
        adapter = self._adapter_of(implementation)
        case = fitted(case, adapter)
        question = _Question(adapter, case, case.identity, as_observed(comparison, adapter), mode)
        try:
            answer = self._settled(question, observe_all=closely)
            finding = answer[0].finding
            if finding is not None and finding.kind in LOCATABLE and not closely:
                answer = self._closer(question, finding, answer)
        except _Unjudged as reason:
            answer = Judgement(Verdict.UNKNOWN, reason=str(reason)), ()
        except PoolBroken as broken:
            answer = Judgement(Verdict.UNKNOWN, reason=f"the pool was lost: {broken}"), ()
        return JudgedCase(case, *answer, time.perf_counter() - start)

    def judge_batch(
        self,
        implementation: Adapter | str,
        cases: Sequence[Case],
        watch: Watch = Watch(),
        *,
        until: Signature | None = None,
        on_records: Callable[[str], object] = lambda _: None,
    ) -> list[JudgedCase]:
        """Run cases that all need the same number of ranks one after the other on the same ranks, and judge them.

        Args:
            implementation: Its adapter or name.
            cases: The cases to run.
            watch: What else to observe, besides the numbers.
            until: Once a case has failed in this way, no more new ranks are used.
            on_records: Called with the folder of the ranks' reports, before it is removed.

        Returns:
            The judgement of each case, in order, up to the first one that failed as `until` says.

        Raises:
            PoolBroken: The pool, or the judging process, was lost.
        """
        adapter = self._adapter_of(implementation)

        def run(start: int, stop: int) -> Attempt:
            return attempt_batch(self.worlds, adapter, cases[start:stop], watch, self._timeout, on_records)

        judgements = settle(cases, run, repeats=self._repeats, until=until)
        return [JudgedCase(case, judgement) for case, judgement in zip(cases, judgements)]

    def side_by_side(self, tasks: Sequence[Callable[[], A]], jobs: int) -> Generator[A]:
        """Yield the results of the tasks in order: `Worlds.side_by_side`."""
        return self.worlds.side_by_side(tasks, jobs)

    def on_ranks(self, function: Callable[..., Any], *args: Any, size: int, backend: str = "gloo") -> list[Any]:
        """Call `function(*args)` on a world of the runner's pool; raise `WorldFailed` unless every rank returned."""
        outcome = self._execute(WorldSpec(size, backend), function, args, function.__name__)
        raise_unless_ok(outcome)
        return outcome.values

    def observe(
        self, implementation: Adapter | str, case: Case, *, observe_all: bool = False
    ) -> tuple[RankObservation, ...]:
        """Run `case` and return what each rank reports.

        Raises:
            PoolBroken: The world did not survive; the message describes every rank.
        """
        adapter = registry.adapter_of(implementation)
        name = f"{adapter.reference} {case.identity}"
        outcome = self._execute(groups_of(case), rank_jobs.run_case, (adapter, case, observe_all), name)
        ranks = _observations(outcome)
        if len(ranks) != case.world.size:
            raise PoolBroken(outcome.describe())
        return ranks

    def _settled(self, question: _Question, *, observe_all: bool) -> Answer:
        ranks: list[tuple[RankObservation, ...]] = []

        def run(_start: int, _stop: int) -> Attempt:
            judgement, reported = self._attempt(question, observe_all=observe_all)
            ranks.append(reported)
            return Attempt((judgement,))

        # The first run is shown; the second only confirms it.
        (judgement,) = settle([question.case], run, repeats=self._repeats)
        return judgement, ranks[0]

    def _attempt(self, question: _Question, *, observe_all: bool) -> Answer:
        case, mode = question.case, question.mode
        name = question.adapter.reference
        arguments = (question.adapter, case, observe_all, *mode.arguments)

        def run() -> WorldOutcome:
            return self._execute_case(case, mode.job, arguments, f"{name} {question.identity}")

        # Adapters may share a name: tests load one again after it was changed.
        key = (Same(question.adapter), question.identity, mode.job, mode.arguments, observe_all)
        outcome = self._kept.get(key, run, keep=lambda ran: ran.ok) if mode.kept else run()
        ranks = _observations(outcome)

        def compared(seen: Sequence[RankObservation], *, narrow: bool) -> Numbers:
            expectation = self._expectation(question, seen, observe_all=observe_all, narrow=narrow)
            return compare_numbers(case, expectation, seen, question.comparison)

        def ask(seen: Sequence[RankObservation]) -> Numbers:
            # The narrowest bounds first: what agrees within them agrees, and takes one replay in place of several.
            quick = compared(seen, narrow=mode.expect is None)
            return quick if quick.decided or mode.expect is not None else compared(seen, narrow=False)

        records = [CaseRecord(0, r, leaks=r.leaks, accounts=getattr(r, "accounts", None)) for r in ranks]
        return judge(case, records, ask, outcome=outcome, review=mode.review), ranks

    def _closer(self, question: _Question, finding: Finding, first: Answer) -> Answer:
        """The same divergence, at the operation where it first shows."""
        closer = self._attempt(question, observe_all=True)
        if closer[0].finding is not None:
            return closer
        if closer[0].verdict is Verdict.UNKNOWN and not closer[0].tally.comparisons:
            raise _Unjudged(_reason(closer[0]))
        note = f"{finding.explanation}; it does not show if every operation is observed"
        return replace(first[0], finding=replace(finding, explanation=note)), first[1]

    def _expectation(
        self, question: _Question, ranks: Sequence[RankObservation], *, observe_all: bool, narrow: bool
    ) -> Expectation:
        mode = question.mode
        case = mode.seen_as(question.case)
        if mode.expect is not None:
            return self._ask_oracle(mode.expect, (case, observe_all, *mode.expect_arguments), case)
        if question.comparison.lockstep:
            arguments = case, question.adapter, assemble.states(ranks), None, not narrow
            return self._ask_oracle(rank_jobs.expect_lockstep, arguments, case)
        asked = case, observe_all, narrow
        key = oracle_view(case).identity, *asked[1:]
        return self._expectations.get(key, lambda: self._ask_oracle(rank_jobs.expect_free, asked, case))

    def _ask_oracle(self, job: Callable[..., Expectation], arguments: tuple[Any, ...], case: Case) -> Expectation:
        outcome = self._execute(WorldSpec(1), job, arguments, f"oracle {case.identity}")
        if not outcome.ok:
            raise _Unjudged(f"the oracle could not run this case\n{outcome.describe()}")
        expectation = outcome.ranks[0].value
        if not isinstance(expectation, Expectation):
            raise _Unjudged(f"the oracle gave a {type(expectation).__name__}")
        return expectation

    def _execute(
        self, world: WorldSpec | KeptGroups, job: Callable[..., Any], arguments: tuple[Any, ...], name: str
    ) -> WorldOutcome:
        return self.worlds.execute(world, job, arguments, name, timeout=self._timeout)

    def _execute_case(self, case: Case, job: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> WorldOutcome:
        """Run a case for judging, with the injected faults."""
        if not self._faults:
            return self._execute(groups_of(case), job, arguments, name)
        outcome = self._execute(groups_of(case), run_with_faults, (self._faults, job, *arguments), name)
        for fault in self._faults if outcome.ok else ():
            ranks = outcome.ranks if fault.rank is None else outcome.ranks[fault.rank : fault.rank + 1]
            if not any(fault.reached_in(rank.stderr) for rank in ranks):
                raise _Unjudged(f"the fault {fault} was never reached. Name an earlier place, or a rank of this world.")
        return outcome


def _observations(outcome: WorldOutcome) -> tuple[RankObservation, ...]:
    """What ranks reported, by rank."""
    reported = [rank for rank in outcome.ranks if isinstance(rank.value, RankObservation)]
    return tuple(rank.value for rank in sorted(reported, key=lambda rank: rank.rank))


def _reason(judgement: Judgement) -> str:
    return f"{judgement.reason}\n{judgement.detail}".strip()
