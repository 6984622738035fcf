"""How is a certificate made? Batches of cells go to lanes; each cell is judged as any case is, and none is passed over."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.source import source_digest
from fsdp_testing.cases.records import LOSES_RANKS, FailureKind
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.batch_judge import CaseNote
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign.batch import Watch
from fsdp_testing.search.campaign.lane import CaseResult, Lane, drive
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of, needs_of
from fsdp_testing.search.certificate.cube import Job, jobs
from fsdp_testing.search.certificate.verdicts import FAILS, HELD, UNKNOWN, Mark, Verdicts

_SAVE_SECONDS = 5.0
CONFIRMED_ALONE = 3
"""So many cells that fail alike are run again alone; a death or a hang always is."""
_TIMES_ALONE = {False: 1, True: 2}
"""How often a cell is run again alone; a batch that was slow hangs in a cell that has nothing to do with it."""
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
        self.runner = CellRunner(plan.implementation)
        subject = f"{plan.implementation.reference}, torch {torch.__version__}"
        self.source = source_digest(plan.implementation)
        asked = jobs(self.runner.claimed, plan.sample, plan.shard)
        self.verdicts = Verdicts(asked, subject, self.source, plan.state)

    def run(self, on_progress: Callable[[Verdicts], None] = lambda _: None) -> Verdicts:
        """Run until all cells have run or a limit is reached; KeyboardInterrupt passes through after everything is saved.

        Args:
            on_progress: Called after every batch.
        """
        plan, verdicts = self.plan, self.verdicts
        before, began, saved = verdicts.seconds, time.monotonic(), time.monotonic()
        remaining, begun = verdicts.remaining(), 0
        scratch = self.pool.shared_directory("fsdp-certify-")

        def next_job() -> Callable[[Lane], tuple[int, Marked]] | None:
            nonlocal begun
            enough = plan.cells is not None and begun >= plan.cells
            late = plan.seconds is not None and time.monotonic() - began >= plan.seconds
            number = None if enough or late else next(remaining, None)
            if number is None:
                return None
            job = verdicts.jobs[number]
            begun += len(job)
            return lambda lane: (number, self.runner.run(lane, job))

        def take(answer: tuple[int, Marked]) -> None:
            nonlocal saved
            verdicts.take(*answer)
            verdicts.seconds = before + time.monotonic() - began
            on_progress(verdicts)
            if time.monotonic() - saved > _SAVE_SECONDS:
                verdicts.save()
                saved = time.monotonic()

        lanes = [Lane(self.pool, plan.implementation, plan.deadline, scratch) for _ in range(plan.lanes)]
        try:
            drive(self.pool, lanes, next_job, take)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            verdicts.save()
        return verdicts

    def lane(self) -> Lane:
        """Return a lane to look closer at single cells."""
        return Lane(self.pool, self.plan.implementation, self.plan.deadline)


class CellRunner:
    """Runs cells of one implementation, on any lane."""

    def __init__(self, implementation: Adapter) -> None:
        self._capabilities = implementation.capabilities
        self._confirmed: Counter[object] = Counter()
        self._lock = threading.Lock()

    def claimed(self, cell: Cell) -> bool:
        """Return whether the implementation may be asked a cell."""
        return needs_of(cell) <= self._capabilities

    def run(self, lane: Lane, job: Job) -> Marked:
        """Run cells of one size and return what is known of each."""
        cases = [case_of(cell, self._capabilities) for cell in job]
        try:
            results = lane.run(cases, _WATCH)
        except PoolBroken as broken:
            # Its judge was lost over one of the cells: that one alone is unknown.
            if len(job) > 1:
                return [marked for cell in job for marked in self.run(lane, (cell,))]
            return [(job[0], Mark(UNKNOWN, str(broken)[:_REASON_LENGTH]))]
        return [(cell, self._mark(lane, result)) for cell, result in zip(job, results, strict=True)]

    def _mark(self, lane: Lane, result: CaseResult) -> Mark:
        note = result.note
        if note.status == "passed":
            return HELD
        if note.signature is None:
            return Mark(UNKNOWN, note.reason[:_REASON_LENGTH])
        kind = note.signature.kind
        confirmed = self._is_to_confirm(kind in LOSES_RANKS, note.signature)
        if confirmed:
            times = _TIMES_ALONE[kind == FailureKind.HUNG]
            try:
                again = [lane.run([result.case], _WATCH)[0].note for _ in range(times)]
            except PoolBroken as broken:
                return Mark(UNKNOWN, str(broken)[:_REASON_LENGTH])
            if kind == FailureKind.ONE_RAISED and all(_is_raised_by_every_rank(one, note) for one in again):
                # In the batch the others were stopped before they came to it, on a busy machine.
                return _fails(again[0], confirmed)
            other = next((one for one in again if one.signature is None or one.signature.kind != kind), None)
            if other is not None:
                reason = f"different results: first {note.signature}, then, alone, {other.reason or 'it held'}"
                return Mark(UNKNOWN, reason[:_REASON_LENGTH])
        return _fails(note, confirmed)

    def _is_to_confirm(self, always: bool, looks: object) -> bool:
        with self._lock:
            self._confirmed[looks] += 1
            return always or self._confirmed[looks] <= CONFIRMED_ALONE


def _fails(note: CaseNote, confirmed: bool) -> Mark:
    return Mark(FAILS, note.reason[:_REASON_LENGTH], tuple(map(str, note.signature or ())), confirmed)


def _is_raised_by_every_rank(alone: CaseNote, first: CaseNote) -> bool:
    """Return whether every rank raised, alone, what one raised in its batch: the same type in the same operation."""
    if alone.signature is None or first.signature is None or alone.signature.kind != FailureKind.RAISED:
        return False
    looks = [(one.quantity.partition(":")[0], one.operation) for one in (alone.signature, first.signature)]
    return looks[0] == looks[1]
