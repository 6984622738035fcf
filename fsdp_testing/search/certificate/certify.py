"""How is a certificate made? Batches of cells go to lanes; each cell is judged as any case is, and none is passed over."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.source import source_digest
from fsdp_testing.cases.records import Judgement, Verdict
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.attempts import confirmed
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of, needs_of
from fsdp_testing.search.certificate.cube import Job, jobs
from fsdp_testing.search.certificate.verdicts import FAILS, HELD, UNKNOWN, Mark, Verdicts

CONFIRMED_ALONE = 3
"""So many cells that fail alike are run again alone; a death or a hang has shown on two worlds already."""
_REASON_LENGTH = 300
_WATCH = Watch(models=True)

Marked = list[tuple[Cell, Mark]]
"""Cells that ran, each with what is said of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be certified.

    Attributes:
        implementation: Loaded by name, so that ranks find it too.
        state: Where it is kept what is known.
        sample: Only about so many cells, spread over all faces; None for all.
        shard: `(i, n)`: the i-th of n parts.
        cells: Begin no cell any more when so many have run this time; None for no limit.
        seconds: Begin no cell any more after so long; None for no limit.
        lanes: Batches under way at a time.
        deadline: Seconds that one cell may take.
    """

    implementation: Adapter
    state: Path
    sample: int | None = None
    shard: tuple[int, int] = (1, 1)
    cells: int | None = None
    seconds: float | None = None
    lanes: int = 2
    deadline: float = 60.0


class Certificate:
    """One run of a certificate; whatever ends it, what it learned is on disk.

    Args:
        plan: What to do.
        pool: Where worlds come from.
    """

    def __init__(self, plan: Plan, pool: Pool) -> None:
        self.plan = plan
        self.pool = pool
        self.runner = CellRunner(plan.implementation, CaseRunner(pool, timeout=plan.deadline))
        subject = f"{plan.implementation.reference}, torch {torch.__version__}"
        self.source = source_digest(plan.implementation)
        claimed = jobs(self.runner.claimed, plan.sample, plan.shard)
        self.verdicts = Verdicts(claimed, subject, self.source, plan.state)

    def run(self, on_progress: Callable[[Verdicts], None] = lambda _: None) -> Verdicts:
        """Run until all cells have run or a limit is reached; KeyboardInterrupt passes through after everything is saved.

        Args:
            on_progress: Called after every batch.
        """
        plan, verdicts = self.plan, self.verdicts
        before, began = verdicts.seconds, time.monotonic()
        remaining, begun = verdicts.remaining(), 0

        def next_job() -> Callable[[], tuple[int, Marked]] | None:
            nonlocal begun
            enough = plan.cells is not None and begun >= plan.cells
            late = plan.seconds is not None and time.monotonic() - began >= plan.seconds
            number = None if enough or late else next(remaining, None)
            if number is None:
                return None
            job = verdicts.jobs[number]
            begun += len(job)
            return lambda: (number, self.runner.run(job))

        def take(answer: tuple[int, Marked]) -> None:
            verdicts.take(*answer)
            verdicts.seconds = before + time.monotonic() - began
            on_progress(verdicts)

        self.runner.cases.worlds.drive(next_job, take, plan.lanes, verdicts.save)
        return verdicts


class CellRunner:
    """Runs cells of one implementation; several threads may each have some run.

    Attributes:
        cases: Runs them.
    """

    def __init__(self, implementation: Adapter, cases: CaseRunner) -> None:
        self.cases = cases
        self._implementation = implementation
        self._capabilities = implementation.capabilities
        self._confirmed: Counter[object] = Counter()
        self._lock = threading.Lock()

    def claimed(self, cell: Cell) -> bool:
        """Return whether the implementation may be asked a cell."""
        return needs_of(cell) <= self._capabilities

    def run(self, job: Job) -> Marked:
        """Run cells of one size and return what is known of each."""
        cases = [case_of(cell, self._capabilities) for cell in job]
        try:
            results = self.cases.judge_batch(self._implementation, cases, _WATCH)
        except PoolBroken as broken:
            # Its judge was lost over one of the cells: that one alone is unknown.
            if len(job) > 1:
                return [marked for cell in job for marked in self.run((cell,))]
            return [(job[0], Mark(UNKNOWN, str(broken)[:_REASON_LENGTH]))]
        return [(cell, self._mark(judged)) for cell, judged in zip(job, results, strict=True)]

    def _mark(self, judged: JudgedCase) -> Mark:
        if judged.verdict is Verdict.PASS:
            return HELD
        signature = judged.signature
        if signature is None:
            return Mark(UNKNOWN, judged.judgement.reason[:_REASON_LENGTH])
        if judged.judgement.loses_ranks:
            return _fails(judged.judgement, confirmed=True)  # it has shown twice
        if not self._is_to_confirm(signature):
            return _fails(judged.judgement, confirmed=False)
        try:
            (alone,) = self.cases.judge_batch(self._implementation, [judged.case], _WATCH)
        except PoolBroken as broken:
            return Mark(UNKNOWN, str(broken)[:_REASON_LENGTH])
        judgement = confirmed(judged.judgement, alone.judgement)
        if judgement.finding is None:
            return Mark(UNKNOWN, judgement.reason[:_REASON_LENGTH])
        return _fails(judgement, confirmed=True)

    def _is_to_confirm(self, looks: object) -> bool:
        with self._lock:
            self._confirmed[looks] += 1
            return self._confirmed[looks] <= CONFIRMED_ALONE


def _fails(judgement: Judgement, *, confirmed: bool) -> Mark:
    assert judgement.finding is not None
    looks = tuple(map(str, signature_of(judgement.finding)))
    return Mark(FAILS, judgement.why[:_REASON_LENGTH], looks, confirmed)
