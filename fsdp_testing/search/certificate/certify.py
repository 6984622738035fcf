"""The source of all small cases: batches of cells, each judged like any case, none skipped."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Judgement, Verdict, opening
from fsdp_testing.errors import InvalidRecord, PoolBroken
from fsdp_testing.judging.attempts import confirmed
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.certificate.axes import Cell, Job, digest, jobs
from fsdp_testing.search.certificate.cases import case_of, needs_of
from fsdp_testing.search.loop import Budget, search
from fsdp_testing.search.state import (
    OPEN,
    SOURCE,
    Reason,
    State,
    Verdicts,
    changes,
    read_state,
    refuse,
    refuse_changed,
    source_digest,
    write_state,
)

CONFIRMED_ALONE = 3
"""How many cells that fail alike are run again alone; a death or a hang has already shown on two worlds."""
_REASON_LENGTH = 300
_WATCH = Watch(models=True)

Judged = list[tuple[Cell, Verdict, Reason | None]]
"""Cells that ran, each with its verdict, and with the reason if it does not pass."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a certificate.

    Attributes:
        implementation: Loaded by name, so that ranks find it too.
        state: The directory of the results.
        sample: Only about this many cells, spread over all faces; None for all.
        shard: `(i, n)`: the i-th of n parts.
        cells: Start no more cells when this many have run in this run; None for no limit.
        seconds: Start no more cells after this time; None for no limit.
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

    Attributes:
        plan: The plan.
        cells: The claimed and sampled cells of this part; a cell's index is its number.
        verdicts: The verdicts on the cells.
        earlier: How many cells have a verdict from earlier runs; 0 if those runs had finished.
        seconds: Time spent, over all runs.

    Args:
        plan: The plan.
        pool: The pool that lends worlds.

    Raises:
        InvalidRecord: The state there is damaged, of another version, of another subject, or from before a change.
    """

    def __init__(self, plan: Plan, pool: Pool) -> None:
        self.plan = plan
        self.runner = CellRunner(plan.implementation, CaseRunner(pool, timeout=plan.deadline))
        self._jobs = jobs(self.runner.claimed, plan.sample, plan.shard)
        self.cells = [cell for job in self._jobs for cell in job]
        self._numbers = {cell: number for number, cell in enumerate(self.cells)}
        self._file = plan.state / "certificate.json"
        self._subject = {
            "implementation": plan.implementation.reference,
            "torch": torch.__version__,
            "cells": f"{len(self.cells)} {digest(repr(self._jobs)):016x}",
            SOURCE: source_digest(plan.implementation),
        }
        self._before = self._load()
        reasons = {int(number): reason for number, reason in self._before.reasons.items()}
        self.verdicts = Verdicts(self._before.verdicts, reasons)
        self.earlier = len(self.cells) - len(self.verdicts.numbers(None))
        remaining = ([cell for cell in job if self.verdict(cell) is None] for job in self._jobs)
        self._remaining = iter([tuple(cells) for cells in remaining if cells])
        self._budget = Budget(plan.seconds, plan.cells)
        self.seconds = self._before.seconds
        self._on_progress: Callable[[Certificate], object] = lambda _: None

    @property
    def source(self) -> str:
        """Return the digest of the implementation and of the harness."""
        return self._subject[SOURCE]

    def verdict(self, cell: Cell) -> Verdict | None:
        return self.verdicts[self._numbers[cell]]

    def reason(self, cell: Cell) -> Reason:
        return self.verdicts.reasons[self._numbers[cell]]

    def failing(self) -> list[Cell]:
        """Return the cells that fail, in an order that does not depend on when they ran."""
        return sorted(self.cells[number] for number in self.verdicts.numbers(Verdict.FAIL))

    # ------------------------------------------------------------------------------------------- the source

    def run(self, on_progress: Callable[[Certificate], object] = lambda _: None) -> Verdicts:
        """Run until all cells have run or a limit is reached; KeyboardInterrupt passes through after everything is saved."""
        self._on_progress = on_progress
        self._budget.restart()
        search(self, self.runner.cases.worlds, self.plan.lanes)
        return self.verdicts

    def next_job(self) -> Callable[[], Judged] | None:
        job = None if self._budget.enough or self._budget.time_is_up() else next(self._remaining, None)
        if job is None:
            return None
        self._budget.begun += len(job)
        silent: Judged = [(cell, Verdict.UNKNOWN, Reason("it has no report")) for cell in job]
        return lambda: silent + self.runner.run(job)

    def take(self, answer: Judged) -> None:
        for cell, verdict, reason in answer:
            self.verdicts.take(self._numbers[cell], verdict, reason)
        self.seconds = self._before.seconds + self._budget.spent
        self._on_progress(self)

    def save(self) -> None:
        refuse_changed(self._subject, source_digest(self.plan.implementation))
        reasons = {str(number): reason for number, reason in self.verdicts.reasons.items()}
        letters, before = self.verdicts.letters, self._before
        state = State(self._subject, self.plan.shard, letters, reasons, runs=before.runs + 1, seconds=self.seconds)
        write_state(self._file, state)

    def _load(self) -> State:
        """Read the results of earlier runs; a finished certificate starts over."""
        fresh = State(self._subject, self.plan.shard, OPEN * len(self.cells))
        if not self._file.exists():
            return fresh
        state = read_state(self._file)
        wrong = changes(self._subject, state, self.plan.shard)
        source = wrong.pop(SOURCE, "")
        refuse(self._file, wrong)
        letters = state.verdicts
        if len(letters) != len(self.cells) or set(letters) - set("pfu."):
            raise InvalidRecord(
                f"{self._file}.verdicts: expected p, f, u or . of each of {len(self.cells)} cells, got {len(letters)} of "
                f"{sorted(set(letters))}. Remove the file."
            )
        if OPEN not in letters and "u" not in letters:
            return fresh
        refuse(self._file, {SOURCE: source} if source else {})
        failing = [number for number, letter in enumerate(letters) if letter == "f"]
        for number in failing:
            if str(number) not in state.reasons or not state.reasons[str(number)].looks:
                name = self.cells[number].name
                raise InvalidRecord(
                    f"{self._file}.reasons: expected the reason why {name} fails, got nothing. Remove the file."
                )
        # Unknown cells run again.
        reasons = {str(number): state.reasons[str(number)] for number in failing}
        return replace(state, verdicts=letters.replace("u", OPEN), reasons=reasons)


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
        return needs_of(cell) <= self._capabilities

    def run(self, job: Job) -> Judged:
        """Run cells of one size and return what is known about each."""
        cases = [case_of(cell, self._capabilities) for cell in job]
        try:
            results = self.cases.judge_batch(self._implementation, cases, _WATCH)
        except PoolBroken as broken:
            # The judge was lost on one of the cells: only that cell is unknown.
            if len(job) > 1:
                return [judged for cell in job for judged in self.run((cell,))]
            return [(job[0], Verdict.UNKNOWN, Reason(opening(str(broken), _REASON_LENGTH)))]
        judgements = map(self._confirmed_judgement, results)
        return [(cell, *_verdict(*pair)) for cell, pair in zip(job, judgements, strict=True)]

    def _confirmed_judgement(self, judged: JudgedCase) -> tuple[Judgement, bool]:
        """The judgement after the cell ran again alone, if it has to; and whether its failure has shown twice."""
        signature = judged.signature
        if signature is None or judged.judgement.loses_ranks:
            return judged.judgement, True
        with self._lock:
            enough = self._confirmed[signature] >= CONFIRMED_ALONE
        if enough:
            return judged.judgement, False
        try:
            (alone,) = self.cases.judge_batch(self._implementation, [judged.case], _WATCH)
        except PoolBroken as broken:
            return Judgement(Verdict.UNKNOWN, reason=str(broken)), False
        settled = confirmed(judged.judgement, alone.judgement)
        with self._lock:
            self._confirmed[signature] += settled.finding is not None
        return settled, True


def _verdict(judgement: Judgement, twice: bool) -> tuple[Verdict, Reason | None]:
    if judgement.finding is None:
        passes = judgement.verdict is Verdict.PASS
        return judgement.verdict, None if passes else Reason(opening(judgement.reason, _REASON_LENGTH))
    looks = tuple(map(str, signature_of(judgement.finding)))
    return Verdict.FAIL, Reason(opening(judgement.why, _REASON_LENGTH), looks, twice)
