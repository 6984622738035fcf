"""How does a campaign go? Draw, run, judge, keep what covered something new, understand what failed, go on."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_testing.campaign.batch import Watch
from fsdp_testing.campaign.coverage import Coverage
from fsdp_testing.campaign.lane import CaseResult, Lane
from fsdp_testing.campaign.mutate import Mutator
from fsdp_testing.campaign.state import Progress, StateDirectory
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.findings.discovery import Discovery, investigate
from fsdp_testing.findings.known import KnownFailures
from fsdp_testing.judging.signature import Signature
from fsdp_testing.pool import Pool
from fsdp_testing.records import Case
from fsdp_testing.strategies import CaseDrawer, Scope, SeededChoices, needs_of_case

BATCH = 24
_SAVE_SECONDS = 5.0
_INVESTIGATED_AT_FIRST = 3
_TRACED_ONE_IN = 40
_KEPT_UNJUDGED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign is asked to do.

    Attributes:
        name: The implementation.
        scope: What may be drawn.
        state: Where it keeps what it learns.
        seconds: When to end; None for no limit.
        examples: How many cases to run at most; None for no limit.
        seed: From which all choices follow.
        lanes: Batches under way at a time.
        deadline: Seconds that one case may take.
        shrink_seconds: Time for shrinking one finding.
        known: Failures to avoid.
        sources: Parts of file names that make a file part of the implementation.
        stop_at_first: End with the first confirmed finding.
    """

    name: str
    scope: Scope
    state: Path
    seconds: float | None = 60.0
    examples: int | None = None
    seed: int = 0
    lanes: int = 2
    deadline: float = 30.0
    shrink_seconds: float = 20.0
    known: KnownFailures = KnownFailures()
    sources: tuple[str, ...] = ()
    stop_at_first: bool = False


@dataclass(slots=True)
class Tally:
    """What has happened in this run.

    Attributes:
        run: Cases run and judged.
        operations: Operations in them.
        statuses: Cases by what became of them.
        discovered: What was found, each defect once.
        duplicates: How often each was met again.
        unjudged: Why nothing could be said of some cases.
        unsupported: Why the implementation refused some cases.
        rules: How often each known failure was edited around.
        stale: Known failures whose example passes.
        discarded: Cases of which a known failure left nothing.
        new: Coverage keys and arcs seen for the first time.
        drawing_seconds: Time spent on drawing.
        investigating_seconds: Time that lanes spent on suspects instead of new cases, added up over lanes.
        seconds: Wall time.
        worlds_lost: Worlds that had to be replaced.
    """

    run: int = 0
    operations: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    discovered: list[Discovery] = field(default_factory=list)
    duplicates: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    stale: list[str] = field(default_factory=list)
    discarded: int = 0
    new: int = 0
    drawing_seconds: float = 0.0
    investigating_seconds: float = 0.0
    seconds: float = 0.0
    worlds_lost: int = 0

    @property
    def rate(self) -> float:
        """Cases per second."""
        return self.run / self.seconds if self.seconds else 0.0


Listener = Callable[[Tally], None]
Finder = Callable[[Discovery, StateDirectory], None]


class Campaign:
    """One run of a campaign; whatever ends it, what it learned is on disk.

    Args:
        plan: What to do.
        pool: Where worlds come from.
        on_progress: Told after every batch.
        on_finding: Told of each new finding; writes it down.
    """

    def __init__(self, plan: Plan, pool: Pool, on_progress: Listener, on_finding: Finder) -> None:
        self._plan = plan
        self._pool = pool
        self._on_progress = on_progress
        self._on_finding = on_finding
        self._state = StateDirectory(plan.state, plan.name)
        self._before = self._state.load()
        self._corpus, self.damaged = self._state.corpus()
        self._coverage = Coverage(self._before.keys, self._before.arcs)
        self._drawer = CaseDrawer(plan.scope)
        self._mutator = Mutator(self._drawer)
        self._drawn = self._before.drawn
        self._known = plan.known
        self._groups: Counter[Signature] = Counter()
        self._keys: dict[object, str] = {}
        self._watch_models = True
        self._started = 0.0
        self.tally = Tally()
        self._remember_earlier()

    def _remember_earlier(self) -> None:
        """What earlier runs found is known now: met again, it is counted and not told again."""
        for folder in self._state.found():
            file = folder / "finding.json"
            try:
                earlier = Discovery.from_json(file.read_text(encoding="utf-8"), str(file))
            except (InvalidRecord, OSError) as error:
                self.damaged.append(str(error))
                continue
            self._keys[earlier.key] = earlier.name
            self._known = self._known.with_rule(earlier.rule())

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> Tally:
        """Runs until time, examples or patience end; KeyboardInterrupt passes through after everything is saved."""
        self._started = time.monotonic()
        scratch = tempfile.mkdtemp(prefix="fsdp-fuzz-")
        plan = self._plan
        lanes = [Lane(self._pool, plan.name, plan.deadline, scratch) for _ in range(max(1, plan.lanes))]
        try:
            self._check_examples(lanes[0])
            self._loop(lanes)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            self.tally.seconds = time.monotonic() - self._started
            self.tally.worlds_lost = sum(lane.worlds_lost for lane in lanes)
            self._save()
        return self.tally

    def _loop(self, lanes: list[Lane]) -> None:
        free = list(lanes)
        running: dict[Future[list[CaseResult] | Discovery | None], Lane] = {}
        suspects: list[CaseResult] = []
        saved = time.monotonic()
        batches = self._batches()
        executor = ThreadPoolExecutor(len(lanes), thread_name_prefix="fuzz-lane")
        try:
            while True:
                while free and (job := self._next_job(suspects, batches)) is not None:
                    lane = free.pop()
                    running[executor.submit(job, lane)] = lane
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    free.append(running.pop(future))
                    suspects += self._take(future.result())
                self.tally.seconds = time.monotonic() - self._started
                self._on_progress(self.tally)
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
        except BaseException:
            # Ranks of batches under way are ended, so that no thread waits for them.
            self._pool.close()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _next_job(
        self, suspects: list[CaseResult], batches: Iterator[list[Case]]
    ) -> Callable[[Lane], list[CaseResult] | Discovery | None] | None:
        if suspects:
            suspect = suspects.pop(0)
            return lambda lane: self._investigate(lane, suspect)
        if self._over():
            return None
        batch = next(batches)
        watch = Watch(models=self._watch_models, arcs=self._traced(batch), sources=self._plan.sources)
        return lambda lane: lane.run(batch, watch)

    def _investigate(self, lane: Lane, suspect: CaseResult) -> Discovery | None:
        start = time.monotonic()
        plan = self._plan
        found = investigate(lane, plan.name, suspect, self._drawer.shape, self._fair, plan.shrink_seconds)
        self.tally.investigating_seconds += time.monotonic() - start
        return found

    def _over(self) -> bool:
        plan = self._plan
        if plan.seconds is not None and time.monotonic() - self._started >= plan.seconds:
            return True
        if plan.examples is not None and self._drawn - self._before.drawn >= plan.examples:
            return True
        return plan.stop_at_first and any(found.confirmed for found in self.tally.discovered)

    def _fair(self, case: Case) -> bool:
        return needs_of_case(case) <= self._plan.scope.capabilities

    # ------------------------------------------------------------------------------------------- drawing

    def _batches(self) -> Iterator[list[Case]]:
        """Batches of cases for one world size each; a size waits until it fills a batch."""
        waiting: dict[int, list[Case]] = {}
        while True:
            start = time.perf_counter()
            ready: list[Case] = []
            while not ready:
                case = self._draw()
                same = waiting.setdefault(case.world.size, [])
                same.append(case)
                if len(same) >= BATCH:
                    ready = waiting.pop(case.world.size)
            self.tally.drawing_seconds += time.perf_counter() - start
            yield ready

    def _draw(self) -> Case:
        while True:
            choices = SeededChoices((self._plan.seed << 40) + self._drawn)
            self._drawn += 1
            if self._corpus and choices.chance(3):
                case = self._mutator.mutate(choices, choices.pick(self._corpus), self._corpus)
                if not self._fair(case) or not case.program:
                    continue
            else:
                case = self._drawer.draw(choices)
            edited, applied = self._known.around(case)
            self.tally.rules.update(applied)
            if edited is None:
                self.tally.discarded += 1
                continue
            shaped = self._drawer.shape(edited) if applied else edited
            if shaped.program:
                return shaped

    def _traced(self, batch: list[Case]) -> tuple[int, ...]:
        if not self._plan.sources:
            return ()
        return tuple(place for place in range(len(batch)) if (self.tally.run + place) % _TRACED_ONE_IN == 0)

    # ------------------------------------------------------------------------------------------- taking in

    def _take(self, answer: list[CaseResult] | Discovery | None) -> list[CaseResult]:
        """Takes in what a job gave; returns suspects that are worth a closer look."""
        if answer is None:
            self.tally.unjudged["a suspect of which nothing can be said alone"] += 1
            return []
        if isinstance(answer, Discovery):
            self._take_discovery(answer)
            return []
        return [result for result in answer if self._take_result(result)]

    def _take_result(self, result: CaseResult) -> bool:
        note, tally = result.note, self.tally
        tally.run += 1
        tally.operations += len(result.case.program)
        tally.statuses[note.status] += 1
        new = self._coverage.add(result.case, note.arcs)
        tally.new += new
        if new and note.status == "passed":
            self._corpus.append(result.case)
            self._state.add_to_corpus(result.case)
        rule = self._known.recognize(note.signature, result.case) if note.signature is not None else None
        if rule is not None:
            tally.rules[rule.name] += 1
            self._watch_models &= note.status != "leaked"
        elif note.status == "unjudged":
            tally.unjudged[note.reason[:200]] += 1
            if tally.unjudged[note.reason[:200]] <= _KEPT_UNJUDGED:
                self._state.keep_unjudged(result.case, note.reason)
        elif note.status == "unsupported":
            tally.unsupported[note.reason[:200]] += 1
        elif note.status == "leaked":
            # One is enough: it is about the implementation, and watching on would find nothing else.
            first, self._watch_models = self._watch_models, False
            return first
        elif note.status == "suspect" and note.signature is not None:
            self._groups[note.signature] += 1
            met = self._groups[note.signature]
            return met <= _INVESTIGATED_AT_FIRST or met % 25 == 0
        return False

    def _take_discovery(self, found: Discovery) -> None:
        rule = next((rule for rule in self._known.rules if rule.applies(found.case)), None) if found.confirmed else None
        if rule is not None:
            # While it shrank it turned out to be, or turned into, what is known already.
            self.tally.duplicates[rule.name] += 1
            return
        key = found.key if found.confirmed else ("unconfirmed", found.signature)
        known = self._keys.get(key)
        if known is not None:
            self.tally.duplicates[known] += 1
            return
        self._keys[key] = found.name
        self.tally.discovered.append(found)
        if found.confirmed:
            self._known = self._known.with_rule(found.rule())
        self._on_finding(found, self._state)

    def _check_examples(self, lane: Lane) -> None:
        """Runs the examples of known failures unedited: what passes by now is stale."""
        for rule, case in self._plan.known.examples():
            if self._fair(case):
                result = lane.run([case], Watch(operations=True))[0]
                if result.note.status in ("passed", "leaked"):
                    self.tally.stale.append(rule.name)

    # ------------------------------------------------------------------------------------------- keeping

    def _save(self) -> None:
        before, tally = self._before, self.tally
        self._state.save(
            Progress(
                implementation=self._plan.name,
                drawn=self._drawn,
                run=before.run + tally.run,
                seconds=before.seconds + time.monotonic() - self._started,
                statuses=dict(Counter(before.statuses) + tally.statuses),
                keys=tuple(sorted(self._coverage.keys)),
                arcs=tuple(sorted(self._coverage.arcs)),
                unsupported=dict(Counter(before.unsupported) + tally.unsupported),
                rules=dict(Counter(before.rules) + tally.rules),
            )
        )
