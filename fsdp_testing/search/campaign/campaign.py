"""How does a campaign go? Draw, run, judge, count what is known, understand what is not, go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.document import read_text
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, needs_of_case
from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.known import KnownFailures, Rule, joined
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign.case_queue import CaseQueue, QueuedCase
from fsdp_testing.search.campaign.example_checks import EXAMPLE_SECONDS, SHARE, check_examples
from fsdp_testing.search.campaign.investigation import Investigated, Investigator, Suspect
from fsdp_testing.search.campaign.state import KNOWN, Progress, StateDirectory
from fsdp_testing.search.campaign.tally import CampaignTally

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
Answer = list[tuple[QueuedCase, JudgedCase]] | Investigated | None


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
        self._runner = CaseRunner(pool, timeout=plan.deadline)
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
        rules = []
        for folder in self._state.found():
            file = folder / "finding.json"
            try:
                earlier = Discovery.from_json(read_text(file, "a finding", "Remove the folder."), str(file))
            except InvalidRecord as error:
                self.damaged.append(str(error))
                continue
            if earlier.confirmed:
                rules.append(earlier.rule())
                self._earlier.add(earlier.name)
            self._keys[earlier.key] = earlier.name
        return KnownFailures(tuple(rules))

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> CampaignTally:
        """Run until time or cases end; KeyboardInterrupt passes through after everything is saved."""
        self._started = self._clock()
        suspects: list[JudgedCase] = []

        def take(answer: Answer) -> None:
            suspects.extend(self._take(answer))
            self.tally.seconds = self._clock() - self._started
            self._on_progress(self.tally)

        try:
            suspects += self._check_examples()
            self._runner.worlds.drive(lambda: self._next_job(suspects), take, max(1, self._plan.lanes), self._save)
        finally:
            self._save()
        return self.tally

    def _next_job(self, suspects: list[JudgedCase]) -> Callable[[], Answer] | None:
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
        cases = [queued.case for queued in batch]
        judge = partial(self._runner.judge_batch, self._plan.implementation, cases, watch)
        return lambda: list(zip(batch, judge(), strict=True))

    def _investigate(self, suspect: JudgedCase) -> Investigated | None:
        start = time.perf_counter()
        investigated = self._investigator.investigate(self._runner, Suspect.of(suspect), self._known)
        self.tally.investigating_seconds += time.perf_counter() - start
        return investigated

    def _time_is_up(self) -> bool:
        limit = self._plan.seconds
        return limit is not None and self._clock() - self._started >= limit

    def _stopped(self) -> bool:
        return self._plan.stop_at_first and any(discovery.confirmed for discovery in self.tally.discovered)

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

    def _take(self, answer: Answer) -> list[JudgedCase]:
        """Take in what a job gave; return suspects that are worth investigating."""
        if isinstance(answer, list):
            return [result for queued, result in answer if self._take_result(queued, result)]
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

    def _take_result(self, queued: QueuedCase, judged: JudgedCase) -> bool:
        judgement, signature, tally = judged.judgement, judged.signature, self.tally
        self._queue.finish(queued)
        tally.count(operations=len(judged.case.program), variant=queued.depth > 0)
        rule = self._known_as(queued, judged)
        if rule is not None and signature is not None:
            self._queue_variants(queued, judged, rule)
            if judgement.cause is None and rule.asks_cause(signature) and self._is_sampled(rule):
                tally.statuses[Verdict.FAIL.value] += 1
                return True
            tally.known[rule.name] += 1
            tally.statuses[KNOWN] += 1
            self._watch_models &= not judgement.only_model_stays
            return False
        tally.statuses[judged.verdict.value] += 1
        if judged.verdict is Verdict.UNKNOWN:
            self._take_unknown(judged)
        elif judgement.only_model_stays:
            # One is enough: it is about the implementation, and watching on would find nothing else.
            first, self._watch_models = self._watch_models, False
            return first
        return signature is not None and self._is_worth_investigating(signature)

    def _take_unknown(self, judged: JudgedCase) -> None:
        reason = judged.judgement.reason
        self.tally.unjudged[reason[:200]] += 1
        if self.tally.unjudged[reason[:200]] <= _KEPT_UNJUDGED:
            name = judged.case.identity
            files = [(f"{name}.json", judged.case.to_json()), (f"{name}.txt", reason + "\n")]
            self._state.write_files("unjudged", files)

    def _known_as(self, queued: QueuedCase, judged: JudgedCase) -> Rule | None:
        """The rule that knows a failure, as far as its looks say."""
        signature, judgement = judged.signature, judged.judgement
        if signature is None:
            return None
        rule = self._known.recognize(signature, judged.features, judgement.cause)
        if rule is None:
            rule = self._known.fitting(self._also.get(signature, ()), queued.case, judgement.operation)
            if rule is None or (self.tally.known[rule.name] + 1) % _INVESTIGATED_LATER_ONE_IN == 0:
                return None
        return rule

    def _queue_variants(self, queued: QueuedCase, judged: JudgedCase, rule: Rule) -> None:
        """Run the case without what brings about each known failure that it may be, for what that may have hidden."""
        signature, judgement = judged.signature, judged.judgement
        assert signature is not None
        others = self._known.recognizing(signature, judged.features, judgement.cause)
        for each in {each.name: each for each in (rule, *others)}.values():
            self._queue.add_variant(queued, each, self._drawer.shape, self._fair)

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

    def _take_discovery(self, discovery: Discovery, met_as: Signature) -> None:
        key = discovery.key if discovery.confirmed else ("unconfirmed", discovery.signature)
        name = self._keys.get(key)
        if name is not None:
            self.tally.duplicates[name] += 1
            self.tally.found_before.update(self._earlier & {name})
            self._also.setdefault(met_as, set()).add(name)
            return
        self._keys[key] = discovery.name
        self.tally.discovered.append(discovery)
        if discovery.confirmed:
            self._known = self._known.with_rule(discovery.rule())
            self._also.setdefault(met_as, set()).add(discovery.name)
        self._on_finding(discovery, self._state)

    def _check_examples(self) -> list[JudgedCase]:
        """Drop the rules whose example passes by now; return the examples that fail in a new way."""
        plan = self._plan

        def allowed(count: int) -> bool:
            in_time = plan.seconds is None or self._clock() - self._started < SHARE * plan.seconds
            return in_time and (plan.examples is None or count <= max(1, SHARE * plan.examples))

        judge = partial(self._runner.impatient(EXAMPLE_SECONDS).judge_batch, plan.implementation)
        checked = check_examples(judge, self._known, self._turns, self._fair, allowed)
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
        tally.worlds_lost = self._runner.worlds.lost
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
