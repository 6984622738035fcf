"""How does a campaign go? Draw, run, judge, count what is known, understand what is not, go on."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.document import read_text
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, needs_of_case
from fsdp_testing.cases.records import Case
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.known import KnownFailures, Rule, joined
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.batch_judge import CaseNote
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign.batch import Watch
from fsdp_testing.search.campaign.case_queue import Asked, CaseQueue
from fsdp_testing.search.campaign.example_checks import SHARE, check_examples
from fsdp_testing.search.campaign.investigation import Investigated, Investigator
from fsdp_testing.search.campaign.lane import CaseResult, Lane, drive
from fsdp_testing.search.campaign.state import Progress, StateDirectory
from fsdp_testing.search.campaign.tally import CampaignTally

_SAVE_SECONDS = 5.0
_INVESTIGATED_AT_FIRST = 3
_INVESTIGATED_LATER_ONE_IN = 25
_KEPT_UNJUDGED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign is asked to do.

    Attributes:
        implementation: What is examined; loaded by name, so that ranks find it too.
        scope: What may be drawn.
        state: Where it keeps what it learns.
        seconds: When to end; None for no limit.
        examples: How many cases to draw at most; None for no limit.
        seed: From which all choices follow.
        lanes: Batches under way at a time.
        deadline: Seconds that one case may take.
        shrink_seconds: Time for shrinking one finding.
        known: Failures to count and not to report.
        stop_at_first: End with the first confirmed finding.
        shard: `(i, n)`: draw only every n-th case of the campaign, beginning with the i-th; `examples` counts those of all parts.
    """

    implementation: Adapter
    scope: Scope
    state: Path
    seconds: float | None = 60.0
    examples: int | None = None
    seed: int = 0
    lanes: int = 2
    deadline: float = 30.0
    shrink_seconds: float = 20.0
    known: KnownFailures = KnownFailures()
    stop_at_first: bool = False
    shard: tuple[int, int] = (1, 1)

    @property
    def drawn_by(self) -> str:
        """Return what cases follow from, besides the implementation, as text to compare."""
        scope = self.scope
        sizes, without = ",".join(map(str, scope.world_sizes)), ",".join(sorted(scope.excluded))
        axis = f", tensor parallelism over {scope.tensor_parallel}" if scope.tensor_parallel > 1 else ""
        return (
            f"seed {self.seed}, world sizes {sizes}{axis}, {scope.max_operations} operations, "
            f"without {without or 'nothing'}"
        )


Listener = Callable[[CampaignTally], None]
Finder = Callable[[Discovery, StateDirectory], None]
Answer = list[tuple[Asked, CaseResult]] | Investigated | None


class Campaign:
    """One run of a campaign; whatever ends it, what it learned is on disk.

    Args:
        plan: What to do.
        pool: Where worlds come from.
        on_progress: Called after every batch.
        on_finding: Called with each new finding; writes it down.
        clock: Seconds, of which only differences count.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        on_progress: Listener,
        on_finding: Finder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._on_progress = on_progress
        self._on_finding = on_finding
        self._clock = clock
        self._state = StateDirectory(plan.state, plan.implementation.reference)
        self._before = self._state.load(plan.shard, plan.drawn_by)
        self._turns = dict(self._before.turns)
        self._drawer = CaseDrawer(plan.scope)
        self._investigator = Investigator(
            plan.implementation.reference, self._drawer.shape, self._fair, plan.shrink_seconds
        )
        self._groups: Counter[Signature] = Counter()
        self._looked_like: Counter[str] = Counter()
        self._also: dict[Signature, set[str]] = {}
        self._keys: dict[object, str] = {}
        self._watch_models = True
        self._started = 0.0
        self.damaged: list[str] = []
        self.tally = CampaignTally()
        self._earlier: set[str] = set()
        self._known = joined([self._found_earlier(), plan.known])
        self._queue = CaseQueue(
            self._draw, self._before.drawn, self._share(plan.examples), self._before.unfinished, self._time_is_up
        )

    def _found_earlier(self) -> KnownFailures:
        """What earlier runs found is known now: met again, it is counted and not reported again."""
        found = []
        for folder in self._state.found():
            file = folder / "finding.json"
            try:
                earlier = Discovery.from_json(read_text(file, "a finding", "Remove the folder."), str(file))
            except InvalidRecord as error:
                self.damaged.append(str(error))
                continue
            if earlier.confirmed:
                found.append(earlier.rule())
                self._earlier.add(earlier.name)
            self._keys[earlier.key] = earlier.name
        return KnownFailures(tuple(found))

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> CampaignTally:
        """Run until time or cases end; KeyboardInterrupt passes through after everything is saved."""
        self._started = self._clock()
        scratch = self._pool.shared_directory("fsdp-fuzz-")
        plan = self._plan
        lanes = [Lane(self._pool, plan.implementation, plan.deadline, scratch) for _ in range(max(1, plan.lanes))]
        try:
            self._loop(lanes, self._check_examples(lanes[0]))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            self.tally.worlds_lost = sum(lane.worlds_lost for lane in lanes)
            self._save()
        return self.tally

    def _loop(self, lanes: list[Lane], suspects: list[CaseResult]) -> None:
        saved = self._clock()

        def take(answer: Answer) -> None:
            nonlocal saved
            suspects.extend(self._take(answer))
            self.tally.seconds = self._clock() - self._started
            self._on_progress(self.tally)
            if self._clock() - saved > _SAVE_SECONDS:
                self._save()
                saved = self._clock()

        drive(self._pool, lanes, lambda: self._next_job(suspects), take)

    def _next_job(self, suspects: list[CaseResult]) -> Callable[[Lane], Answer] | None:
        if self._stopped():
            return None
        if suspects:
            return partial(self._investigate, suspect=suspects.pop(0))
        start = time.perf_counter()
        batch = self._queue.next_batch(self._known)
        self.tally.drawing_seconds += time.perf_counter() - start
        if not batch:
            return None
        watch = Watch(models=self._watch_models)
        return lambda lane: list(zip(batch, lane.run([asked.case for asked in batch], watch)))

    def _investigate(self, lane: Lane, suspect: CaseResult) -> Investigated | None:
        start = time.perf_counter()
        found = self._investigator.investigate(lane, suspect, self._known)
        self.tally.investigating_seconds += time.perf_counter() - start
        return found

    def _time_is_up(self) -> bool:
        limit = self._plan.seconds
        return limit is not None and self._clock() - self._started >= limit

    def _stopped(self) -> bool:
        return self._plan.stop_at_first and any(found.confirmed for found in self.tally.discovered)

    def _fair(self, case: Case) -> bool:
        scope = self._plan.scope
        return needs_of_case(case) <= scope.capabilities and case.world.tensor_parallel <= scope.tensor_parallel

    def _draw(self, number: int) -> Case:
        first, of = self._plan.shard
        return self._drawer.draw(SeededChoices((self._plan.seed << 40) + number * of + first - 1))

    def _share(self, examples: int | None) -> int | None:
        first, of = self._plan.shard
        return examples if examples is None else len(range(first - 1, examples, of))

    # ------------------------------------------------------------------------------------------- taking in

    def _take(self, answer: Answer) -> list[CaseResult]:
        """Take in what a job gave; return suspects that are worth investigating."""
        if isinstance(answer, list):
            return [result for asked, result in answer if self._take_result(asked, result)]
        if answer is None:
            self.tally.unjudged["a suspect that could not be judged alone"] += 1
        elif answer.known is not None:
            # The next one that looks so among other cases need not run alone to be known.
            self._also.setdefault(answer.signature, set()).add(answer.known.name)
            counts = self.tally.known if answer.discovery is None else self.tally.duplicates
            counts[answer.known.name] += 1
            self.tally.found_before.update(self._earlier & {answer.known.name})
        elif answer.discovery is not None:
            self._take_discovery(answer.discovery, answer.signature)
        return []

    def _take_result(self, asked: Asked, result: CaseResult) -> bool:
        note, tally = result.note, self.tally
        self._queue.finish(asked)
        tally.count(operations=len(result.case.program), variant=asked.depth > 0)
        rule = self._known_as(asked, note)
        if rule is not None and note.signature is not None:
            self._queue_variants(asked, note, rule)
            if note.cause is None and rule.asks_cause(note.signature) and self._is_sampled(rule):
                tally.statuses["suspect"] += 1
                return True
            tally.known[rule.name] += 1
            tally.statuses["known"] += 1
            self._watch_models &= note.status != "leaked"
            return False
        tally.statuses[note.status] += 1
        if note.status == "unjudged":
            tally.unjudged[note.reason[:200]] += 1
            if tally.unjudged[note.reason[:200]] <= _KEPT_UNJUDGED:
                name = result.case.identity
                files = [(f"{name}.json", result.case.to_json()), (f"{name}.txt", note.reason + "\n")]
                self._state.write_files("unjudged", files)
        elif note.status == "leaked":
            # One is enough: it is about the implementation, and watching on would find nothing else.
            first, self._watch_models = self._watch_models, False
            return first
        elif note.status == "suspect" and note.signature is not None:
            return self._is_worth_investigating(note.signature)
        return False

    def _known_as(self, asked: Asked, note: CaseNote) -> Rule | None:
        """The rule that knows a failure, as far as its looks say."""
        if note.signature is None:
            return None
        rule = self._known.recognize(note.signature, asked.case, note.at, note.cause, note.units)
        if rule is None:
            rule = self._known.fitting(self._also.get(note.signature, ()), asked.case, note.at)
            if rule is None or (self.tally.known[rule.name] + 1) % _INVESTIGATED_LATER_ONE_IN == 0:
                return None
        return rule

    def _queue_variants(self, asked: Asked, note: CaseNote, rule: Rule) -> None:
        """Run the case without what brings about each known failure that it may be, for what that may have hidden."""
        assert note.signature is not None
        others = self._known.recognizing(note.signature, asked.case, note.at, note.cause, note.units)
        for one in {one.name: one for one in (rule, *others)}.values():
            self._queue.add_variant(asked, one, self._drawer.shape, self._fair)

    def _is_sampled(self, rule: Rule) -> bool:
        """Whether the next failure that looks like a known one runs alone and is asked its cause."""
        self._looked_like[rule.name] += 1
        met = self._looked_like[rule.name]
        return met <= _INVESTIGATED_AT_FIRST or met % _INVESTIGATED_LATER_ONE_IN == 0

    def _is_worth_investigating(self, signature: Signature) -> bool:
        self._groups[signature] += 1
        met = self._groups[signature]
        worth = met <= _INVESTIGATED_AT_FIRST or met % _INVESTIGATED_LATER_ONE_IN == 0
        self.tally.not_investigated += not worth
        return worth

    def _take_discovery(self, found: Discovery, met_as: Signature) -> None:
        key = found.key if found.confirmed else ("unconfirmed", found.signature)
        known = self._keys.get(key)
        if known is not None:
            self.tally.duplicates[known] += 1
            self.tally.found_before.update(self._earlier & {known})
            self._also.setdefault(met_as, set()).add(known)
            return
        self._keys[key] = found.name
        self.tally.discovered.append(found)
        if found.confirmed:
            self._known = self._known.with_rule(found.rule())
            self._also.setdefault(met_as, set()).add(found.name)
        self._on_finding(found, self._state)

    def _check_examples(self, lane: Lane) -> list[CaseResult]:
        """Drop the rules whose example passes by now; return the examples that fail in a new way."""
        plan = self._plan

        def allowed(count: int) -> bool:
            in_time = plan.seconds is None or self._clock() - self._started < SHARE * plan.seconds
            return in_time and (plan.examples is None or count <= max(1, SHARE * plan.examples))

        checked = check_examples(lane, self._known, self._turns, self._fair, allowed)
        self._known = self._known.without_rules(checked.gone)
        self._keys = {key: name for key, name in self._keys.items() if name not in checked.gone}
        self._turns.update(dict.fromkeys(checked.ran, self._before.campaigns))
        self.tally.found_before.update(self._earlier & set(checked.still))
        self.tally.gone += checked.gone
        self.tally.examples = (len(checked.ran), len(checked.ran) + checked.left)
        return checked.changed

    # ------------------------------------------------------------------------------------------- keeping

    def _save(self) -> None:
        before, tally, queue = self._before, self.tally, self._queue
        tally.seconds = self._clock() - self._started
        tally.drawn = queue.drawn - before.drawn
        tally.postponed = Counter(queue.postponed)
        tally.left = len(queue.unfinished)
        tally.resumed = len(before.unfinished)
        self._state.save(
            Progress(
                implementation=before.implementation,
                campaigns=before.campaigns + 1,
                drawn=queue.drawn,
                run=before.run + tally.run,
                seconds=before.seconds + tally.seconds,
                statuses=dict(Counter(before.statuses) + tally.statuses),
                known=dict(Counter(before.known) + tally.known),
                not_investigated=before.not_investigated + tally.not_investigated,
                unfinished=queue.unfinished,
                turns=self._turns,
                shard=self._plan.shard,
                drawn_by=self._plan.drawn_by,
                known_by=self._plan.known.digest,
            )
        )
