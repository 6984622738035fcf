"""How does a batch of cases become results, whatever happens to the ranks? One lane lends worlds and sees to it.

A bad case costs itself only: what the ranks reported before it is judged, what comes after it runs again on a new world.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import LOSES_RANKS, Case, FailureKind
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.batch_judge import CaseNote, judge_batch, note_of
from fsdp_testing.judging.judge import lost_ranks
from fsdp_testing.judging.record_stream import read
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome
from fsdp_testing.ranks.pool.preload import TRAINING
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld
from fsdp_testing.search.campaign.batch import LASTING, Watch, run_batch

SECONDS_PER_CASE = 0.5
BATCHES_PER_WORLD = 100
_CLOSE_SECONDS = 0.5

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one case gave; `account` says what became of the ranks where one was lost."""

    case: Case
    note: CaseNote
    account: str = ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What one world gave: results up to the first case that is not finished, and the fates that none of them explains."""

    results: list[CaseResult]
    unexplained: WorldOutcome | None = None


def _loses_ranks(result: CaseResult) -> bool:
    return result.note.signature is not None and result.note.signature.kind in LOSES_RANKS


def _is_unexplained(outcome: WorldOutcome, results: Sequence[CaseResult]) -> bool:
    """Return whether ranks were lost, or parted, although what they reported up to then says nothing of it."""
    if any(rank.fate in (Fate.DIED, Fate.HUNG) for rank in outcome.ranks):
        return not any(map(_loses_ranks, results))
    return not outcome.ok and all(result.note.status in ("passed", "leaked") for result in results)


def _once(result: CaseResult, lost: WorldOutcome) -> CaseResult:
    """Return the result of a case that was right, on ranks that were lost for a reason that does not show again."""
    if result.note.signature is not None:
        return result
    reason = f"different results: first {lost.cause}; then, on other ranks, {result.note.reason or 'it held'}"
    return replace(result, note=replace(result.note, status="unjudged", reason=reason), account=lost.describe())


class Lane:
    """Runs batches on worlds of one pool; one batch at a time.

    Args:
        pool: Where worlds come from.
        implementation: Its adapter; where a name enters, the name.
        deadline: Seconds that one case may take before it counts as hung.
        scratch: Where the folders of batches are made; whoever gives it removes it.
        on_records: Called with the folder of what the ranks reported, before it is removed.
    """

    def __init__(
        self,
        pool: Pool,
        implementation: Adapter | str,
        deadline: float = 30.0,
        scratch: str | None = None,
        on_records: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._pool = pool
        self._adapter = registry.adapter_of(implementation)
        self._deadline = deadline
        self._scratch = scratch
        self._on_records = on_records
        self._batches = 0
        self._stopped = False
        self.worlds_lost = 0

    @property
    def pool(self) -> Pool:
        """Where worlds come from."""
        return self._pool

    def stop(self) -> None:
        """Ask for no world any more: whoever runs cases here gets `PoolBroken`. For another thread to call."""
        self._stopped = True

    def _world(self, size: int, backend: str = "gloo") -> PooledWorld:
        if self._stopped:
            raise PoolBroken("the campaign was interrupted")
        self._pool.expect(*TRAINING)
        return self._pool.world(size, backend=backend)

    def run(
        self,
        cases: Sequence[Case],
        watch: Watch = Watch(),
        *,
        until: Signature | None = None,
        deadline: float | None = None,
    ) -> list[CaseResult]:
        """Run and judge cases that all need the same number of ranks.

        Args:
            cases: What to run.
            watch: What is observed besides the numbers.
            until: Nothing is run any more on new ranks once a case has failed in this way.
            deadline: As for the lane, if it is to be shorter this time.

        Returns:
            One result for each case, in order; up to the first one that failed as asked, if that was asked.
        """
        results: list[CaseResult] = []
        limit = self._deadline if deadline is None else min(deadline, self._deadline)
        lost: WorldOutcome | None = None
        while len(results) < len(cases):
            start = len(results)
            attempt = self._attempt(cases[start:], watch, limit)
            if lost is not None and not _loses_ranks(attempt.results[0]):
                # Ranks were lost in this case, or by what an earlier one left behind.
                attempt.results[0] = _once(attempt.results[0], lost)
            ended = start + len(attempt.results) == len(cases)
            lost = None if ended else attempt.unexplained
            if ended and attempt.unexplained is not None and len(attempt.results) > 1:
                attempt = replace(attempt, results=self._alone(attempt, watch, limit))
            results += attempt.results
            found = [place for place, one in enumerate(results) if until is not None and one.note.signature == until]
            if found:
                return results[: found[0] + 1]
        return results

    def _alone(self, batch: _Attempt, watch: Watch, deadline: float) -> list[CaseResult]:
        """Run the cases of a batch alone, of which one lost ranks after the last report; one that does it says so then.

        Where none does it alone, nobody knows which one did: the last one stands for them.
        """
        assert batch.unexplained is not None
        alone = [self._attempt([result.case], watch, deadline).results[0] for result in batch.results]
        results = [again if _loses_ranks(again) else first for first, again in zip(batch.results, alone, strict=True)]
        if not any(map(_loses_ranks, results)):
            results[-1] = _once(results[-1], batch.unexplained)
        return results

    def _attempt(self, todo: Sequence[Case], watch: Watch, deadline: float) -> _Attempt:
        if self._scratch is None:
            directory = self._pool.shared_directory("fsdp-fuzz-")
        else:
            directory = tempfile.mkdtemp(prefix="fsdp-fuzz-", dir=self._scratch)
        try:
            outcome = self._run(todo, directory, watch, deadline)
            self._on_records(directory)
            notes = self._judge(todo, directory, watch)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        results: list[CaseResult] = []
        died = any(rank.fate is Fate.DIED for rank in outcome.ranks)
        for case, note in zip(todo, notes, strict=True):
            if note.status == "unfinished" and results:
                break  # it may be this case or what an earlier one left behind: it goes first in the next attempt
            # What survivors of a death raise is its echo, whatever it says.
            echo = died and note.signature is not None and note.signature.kind == FailureKind.ONE_RAISED
            if note.status == "unfinished" or echo:
                note = replace(note_of(lost_ranks(case, outcome)), index=note.index)
            account = outcome.describe() if note.status not in ("passed", "leaked") and not outcome.ok else ""
            results.append(CaseResult(case, note, account))
            if _loses_ranks(results[-1]):
                break
        unexplained = outcome if _is_unexplained(outcome, results) else None
        if unexplained is not None and len(todo) == 1:
            note = replace(note_of(lost_ranks(todo[0], outcome)), comparisons=results[0].note.comparisons)
            results = [CaseResult(todo[0], note, outcome.describe())]
        return _Attempt(results, unexplained)

    def _run(self, cases: Sequence[Case], directory: str, watch: Watch, deadline: float) -> WorldOutcome:
        first = cases[0].world
        world = self._world(first.size, first.backend)
        try:
            timeout = deadline + SECONDS_PER_CASE * len(cases)
            arguments = (self._adapter, cases, directory, watch)
            outcome = world.execute(run_batch, arguments, timeout=timeout, name="batch", lasting=LASTING)
            self._batches += 1
            if self._batches % BATCHES_PER_WORLD == 0:
                world.leave()  # what implementations keep in memory for good must not add up
        except PoolBroken as broken:
            begun = min(len(read(directory, rank)) for rank in range(first.size))
            raise PoolBroken(f"case {cases[min(begun, len(cases) - 1)].identity}: {broken}") from broken
        finally:
            world.release()
        self.worlds_lost += not outcome.ok
        return outcome

    def _judge(self, cases: Sequence[Case], directory: str, watch: Watch) -> list[CaseNote]:
        world = self._world(1)
        try:
            arguments = (self._adapter, cases, cases[0].world.size, directory, watch.operations)
            outcome = world.execute(judge_batch, arguments, timeout=300.0, name="judge")
        finally:
            world.release()
        if not outcome.ok:
            raise PoolBroken(f"the judge of a batch was lost. {outcome.describe()}")
        notes: list[CaseNote] = outcome.ranks[0].value
        return notes


def drive(
    pool: Pool, lanes: Sequence[Lane], next_job: Callable[[], Callable[[Lane], A] | None], take: Callable[[A], None]
) -> None:
    """Keep all lanes busy until there is no job any more and all are done.

    Args:
        pool: The lanes' own; closed if this is interrupted, which ends the jobs under way.
        lanes: Each runs one job at a time, in a thread of its own.
        next_job: Gives the next job; None while there is none, until an answer was taken.
        take: Called with each answer, in this thread.
    """
    free = list(lanes)
    running: dict[Future[A], Lane] = {}
    executor = ThreadPoolExecutor(len(lanes), thread_name_prefix="fsdp-lane")
    try:
        while True:
            while free and (job := next_job()) is not None:
                lane = free.pop()
                running[executor.submit(job, lane)] = lane
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                free.append(running.pop(future))
                take(future.result())
    except BaseException:
        # Ranks of batches under way are ended, so that no thread waits for them. A thread may just be asking for the
        # next world, which a pool that was closed makes anew: so until all threads have ended.
        for lane in lanes:
            lane.stop()
        pool.close()
        while wait(running, timeout=_CLOSE_SECONDS).not_done:
            pool.close()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
