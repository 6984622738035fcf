"""The source of random cases: it draws cases, counts known failures, has new ones investigated, and goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsdp_testing.base.document import read_text
from fsdp_testing.cases.drawing import CaseDrawer, SeededChoices, needs_of_case
from fsdp_testing.cases.records import Case, Verdict, opening
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.known import KnownFailures, Rule, joined
from fsdp_testing.judging.signature import Signature
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.campaign.case_queue import EXAMPLE_SECONDS, SHARE, CaseQueue, QueuedCase, check_examples
from fsdp_testing.search.campaign.plan import Plan
from fsdp_testing.search.campaign.tally import CampaignTally
from fsdp_testing.search.campaign.writing import STATE_FILE, findings_in, write_files
from fsdp_testing.search.investigation import (
    AT_FIRST,
    AT_FIRST_OF_LISTED,
    LATER_ONE_IN,
    Causes,
    Investigated,
    Investigator,
    LookAlikes,
    Suspect,
)
from fsdp_testing.search.loop import Budget, search
from fsdp_testing.search.state import (
    FORMER,
    OPEN,
    SOURCE,
    Reason,
    State,
    Verdicts,
    changes,
    read_state,
    refuse,
    refuse_changed,
    write_state,
)

_RESTORE = "Restore it, or begin again with another --state."
_KEPT_UNJUDGED = 3
_REASON_LENGTH = 300


Listener = Callable[[CampaignTally], None]
Writer = Callable[[Discovery, Path], None]
Batch = list[tuple[QueuedCase, JudgedCase]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result on a suspect; an example of a known failure was not queued."""

    queued: QueuedCase | None
    investigated: Investigated | None


class Campaign:
    """One run of a campaign; whatever ends it, what it learned is on disk.

    Args:
        plan: The plan.
        pool: The pool that lends worlds.
        on_progress: Called after every batch.
        on_finding: Called with each new finding; writes it down.
        clock: Seconds; only differences count.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        on_progress: Listener,
        on_finding: Writer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._runner = CaseRunner(pool, timeout=plan.deadline)
        self._on_progress = on_progress
        self._on_finding = on_finding
        self._file = plan.state / STATE_FILE
        self._before = self._load()
        reasons = {int(number): reason for number, reason in self._before.reasons.items()}
        self.verdicts = Verdicts(self._before.verdicts, reasons)
        self._variants: Counter[Verdict] = Counter()
        self._turns = dict(self._before.turns)
        self._drawer = CaseDrawer(plan.scope)
        self._investigator = Investigator(
            plan.implementation.reference, self._drawer.shape, self._fair, plan.shrink_seconds
        )
        self._look_alikes = LookAlikes(AT_FIRST_OF_LISTED if plan.listed else AT_FIRST)
        self._keys: dict[object, str] = {}
        self._suspects: list[tuple[QueuedCase | None, JudgedCase]] = []
        self._not_looked_at: Counter[tuple[int | None, int | None]] = Counter()
        self._watch_models = True
        self.tally = CampaignTally(resumed=len(self._before.unfinished))
        self._earlier: set[str] = set()
        self._causes = Causes(joined([self._found_earlier(), plan.known]))
        listed = self._share(len(plan.listed) or None)
        cases = self._share(plan.examples) if listed is None else listed - len(self._before.verdicts)
        self._budget = Budget(plan.seconds, cases, clock)
        self._queue = CaseQueue(self._draw, self.verdicts, self._budget)

    def _load(self) -> State:
        """The state that earlier runs left.

        A part continues only with its own cases, because `merge` counts its verdicts. A whole campaign continues after a
        change, also of options, with the next number; cases from before the change say nothing about the current code.
        """
        plan, subject = self._plan, self._plan.subject
        fresh = State(subject, plan.shard)
        if not self._file.exists():
            return fresh
        state = read_state(self._file)
        wrong = changes(subject, state, plan.shard)
        whole = plan.shard == (1, 1) == state.shard
        refuse(self._file, {name: wrong[name] for name in wrong if name == "implementation" or not whole})
        if not wrong:
            return state.reopened()
        if plan.listed:
            return fresh  # each number now stands for another case
        former = "".join(letter if letter == OPEN else FORMER for letter in state.verdicts)
        return replace(fresh, verdicts=former, turns=state.turns, runs=state.runs, seconds=state.seconds)

    def _found_earlier(self) -> KnownFailures:
        """Findings of earlier runs are known now: if met again, they are counted and not reported.

        Raises:
            InvalidRecord: One is damaged or gone: without it the campaign would end as if it had found nothing.
        """
        rules = []
        for folder in findings_in(self._plan.state, self._before.found):
            file = folder / "finding.json"
            earlier = Discovery.from_json(read_text(file, "a finding", _RESTORE), str(file))
            if earlier.confirmed:
                rules.append(earlier.rule())
                self._earlier.add(earlier.name)
            self._keys[_key(earlier)] = earlier.name
        return KnownFailures(tuple(rules))

    # ------------------------------------------------------------------------------------------- the source

    def run(self) -> CampaignTally:
        """Run until time or cases end; KeyboardInterrupt passes through after everything is saved."""
        self._budget.restart()
        try:
            self._check_examples()
            search(self, self._runner.worlds, max(1, self._plan.lanes))
        finally:
            self.save()
        return self.tally

    def next_job(self) -> Callable[[], Batch | _Answer] | None:
        """Return a suspect to investigate, else the next batch: later batches know the findings."""
        if self._plan.stop_at_first and any(discovery.confirmed for discovery in self.tally.discovered):
            return None
        if self._suspects:
            return partial(self._investigate, *self._suspects.pop(0))
        start = time.perf_counter()
        batch = self._queue.next_batch(self._causes.rules)
        self.tally.drawing_seconds += time.perf_counter() - start
        if not batch:
            return None
        cases = [queued.case for queued in batch]
        judge = partial(self._runner.judge_batch, self._plan.implementation, cases, Watch(models=self._watch_models))
        return lambda: list(zip(batch, judge(), strict=True))

    def take(self, answer: Batch | _Answer) -> None:
        """Take in the result of a job, and keep the suspects that are worth investigating."""
        if isinstance(answer, list):
            suspects = [pair for pair in answer if self._take_result(*pair)]
            self._suspects += suspects
            self._not_looked_at.update((queued.number, queued.origin) for queued, _ in suspects)
        else:
            self._take_investigated(answer.queued, answer.investigated)
        self.tally.seconds = self._budget.spent
        self._on_progress(self.tally)

    def save(self) -> None:
        """Write the verdicts, and whatever else the next run needs to continue."""
        before, tally = self._before, self.tally
        tally.seconds = self._budget.spent
        tally.worlds_lost = self._runner.worlds.lost
        tally.drawn = len(self.verdicts) - len(before.verdicts)
        tally.postponed = Counter(self._queue.postponed)
        tally.left = len(self.verdicts.numbers(None))
        pending = self._not_looked_at
        suspects = {number for either in pending for number in either if number is not None}
        refuse_changed(before.subject, self._plan.subject[SOURCE])
        variants = Counter(before.variants) + Counter({v.value: count for v, count in self._variants.items()})
        write_state(
            self._file,
            State(
                before.subject,
                before.shard,
                self.verdicts.letters,
                {str(number): reason for number, reason in self.verdicts.reasons.items()},
                variants,
                known=dict(Counter(before.known) + tally.known),
                not_investigated=before.not_investigated + tally.not_investigated,
                suspects=tuple(sorted(suspects)),
                suspect_variants=sum(count for (number, _), count in pending.items() if number is None),
                found=tuple(folder.name for folder in findings_in(self._plan.state)),
                listed=len(self._plan.listed),
                turns=self._turns,
                runs=before.runs + 1,
                seconds=before.seconds + tally.seconds,
            ),
        )

    def _investigate(self, queued: QueuedCase | None, suspect: JudgedCase) -> _Answer:
        start = time.perf_counter()
        investigated = self._investigator.investigate(self._runner, Suspect.of(suspect), self._causes.rules)
        self.tally.investigating_seconds += time.perf_counter() - start
        return _Answer(queued, investigated)

    def _fair(self, case: Case) -> bool:
        scope = self._plan.scope
        return needs_of_case(case) <= scope.capabilities and case.world.tensor_parallel <= scope.tensor_parallel

    def _draw(self, number: int) -> Case:
        first, of = self._plan.shard
        if self._plan.listed:
            return self._plan.listed[number * of + first - 1]
        return self._drawer.draw(SeededChoices((self._plan.seed << 40) + number * of + first - 1))

    def _share(self, examples: int | None) -> int | None:
        first, of = self._plan.shard
        return examples if examples is None else len(range(first - 1, examples, of))

    # ------------------------------------------------------------------------------------------- taking in

    def _settle(
        self, queued: QueuedCase, verdict: Verdict, former: Verdict | None = None, why: Reason | None = None
    ) -> None:
        """Record the verdict on a case; a suspect fails until its investigation gives the verdict."""
        counts = [self.tally.verdicts]
        if queued.number is not None:
            why = why or self.verdicts.reasons.get(queued.number)
            self.verdicts.take(queued.number, verdict, why if self._plan.listed else None)
        else:
            counts.append(self._variants)
        for count in counts:
            count.update([verdict])
            count.subtract([former] if former is not None else [])

    def _take_result(self, queued: QueuedCase, judged: JudgedCase) -> bool:
        judgement, signature, tally = judged.judgement, judged.signature, self.tally
        tally.run += 1
        tally.operations += len(judged.case.program)
        tally.variants += queued.depth > 0
        rules = self._rules_of(judged)
        if rules and signature is not None:
            # For each possible known failure, run the case without its cause too: it may have hidden another failure.
            for rule in rules:
                self._queue.add_variant(queued, rule, self._drawer.shape, self._fair)
            rule = rules[0]
            asks = judgement.cause is None and rule.asks_cause(signature)
            if asks and self._look_alikes.asks_cause(rule.name):
                self._settle(queued, Verdict.FAIL, why=_reason(judged))
                return True
            tally.known[rule.name] += 1
            tally.found_before.update(self._earlier & {rule.name})
            self._settle(queued, self._known_by(rule), why=Reason(rule.name))
            # A rule that covers only some cases says nothing about the models of others.
            self._watch_models &= not judgement.only_model_stays or bool(rule.operations or rule.tags)
            return False
        self._settle(queued, judged.verdict, why=_reason(judged))
        if judged.verdict is Verdict.UNKNOWN:
            self._take_unknown(judged)
        elif judgement.only_model_stays:
            # One remark is enough: it is about the implementation, and more runs would find the same.
            first, self._watch_models = self._watch_models, False
            return first
        return signature is not None and self._is_worth_investigating(signature)

    def _known_by(self, rule: Rule) -> Verdict:
        """The verdict on a case that a rule knows: a listed case fails if the campaign itself found the rule."""
        own = self._plan.listed and rule.name in self._found_here()
        return Verdict.FAIL if own else Verdict.EXPECTED_FAILURE

    def _found_here(self) -> set[str]:
        """The findings of this campaign, of earlier runs too."""
        return self._earlier.union(discovery.name for discovery in self.tally.discovered)

    def _note_found(self, name: str, met_as: Signature) -> None:
        """Note a failure by a rule: whether it was found by this campaign, and how it looked."""
        self.tally.found_before.update(self._earlier & {name})
        if name in self._found_here():
            self._look_alikes.add_finding(met_as)

    def _take_unknown(self, judged: JudgedCase) -> None:
        reason = judged.judgement.reason
        self.tally.unjudged[reason[:200]] += 1
        if self.tally.unjudged[reason[:200]] <= _KEPT_UNJUDGED:
            name = judged.case.identity
            files = [(f"{name}.json", judged.case.to_json()), (f"{name}.txt", reason + "\n")]
            write_files(self._plan.state / "unjudged", files)

    def _rules_of(self, judged: JudgedCase) -> list[Rule]:
        """The rules that match the signature of a failure."""
        signature, judgement = judged.signature, judged.judgement
        if signature is None:
            return []
        if known := self._causes.rules.recognizing(signature, judged.features, judgement.cause):
            return known
        rule = self._causes.by_looks(signature, judged.case, judgement.operation)
        # Investigate one in many: a failure with this signature in a batch may be another one by now.
        again = rule is not None and (self.tally.known[rule.name] + 1) % LATER_ONE_IN == 0
        return [rule] if rule is not None and not again else []

    def _is_worth_investigating(self, signature: Signature) -> bool:
        worth = self._look_alikes.must_be_investigated(signature)
        self.tally.not_investigated += not worth
        return worth

    def _take_investigated(self, queued: QueuedCase | None, answer: Investigated | None) -> None:
        verdict = Verdict.FAIL
        if answer is None:
            self.tally.unjudged["a suspect that could not be judged alone"] += 1
            verdict = Verdict.UNKNOWN
        elif answer.known is not None:
            # The next failure with this signature in a batch need not run alone to be known.
            self._causes.learn(answer.signature, answer.known.name)
            counts = self.tally.duplicates if answer.known.name in self._found_here() else self.tally.known
            counts[answer.known.name] += 1
            self._note_found(answer.known.name, answer.signature)
            verdict = self._known_by(answer.known)
            met_as = queued and self._causes.rules.recognizing(answer.signature, queued.case)
            if queued is not None and (answer.discovery is not None or not met_as):
                # Known only when run alone or shortened: before, the whole case may have failed for another reason.
                self._queue.add_variant(queued, answer.known, self._drawer.shape, self._fair)
        elif answer.discovery is not None:
            self._take_discovery(answer.discovery, answer.signature)
            verdict = Verdict.FAIL if answer.discovery.confirmed else Verdict.UNKNOWN
        if queued is not None:
            self._settle(queued, verdict, former=Verdict.FAIL)
            self._not_looked_at -= Counter([(queued.number, queued.origin)])

    def _take_discovery(self, discovery: Discovery, met_as: Signature) -> None:
        key = _key(discovery)
        name = self._keys.get(key)
        if name is not None:
            self.tally.duplicates[name] += 1
            self._note_found(name, met_as)
            self._causes.learn(met_as, name)
            return
        self._keys[key] = discovery.name
        self.tally.discovered.append(discovery)
        if discovery.confirmed:
            self._causes.add(discovery, met_as)
            self._look_alikes.add_finding(met_as)
        self._on_finding(discovery, self._plan.state)

    def _check_examples(self) -> None:
        """Drop the rules whose example passes by now; examples that fail in a new way are suspects."""
        plan, causes = self._plan, self._causes

        def allowed(count: int) -> bool:
            few = plan.examples is None or count <= max(1, SHARE * plan.examples)
            return few and not self._budget.time_is_up(SHARE)

        judge = partial(self._runner.impatient(EXAMPLE_SECONDS).judge_batch, plan.implementation)
        checked = check_examples(judge, causes.rules, self._turns, self._fair, allowed, self._earlier)
        causes.rules = causes.rules.without_rules(checked.gone)
        self._keys = {key: name for key, name in self._keys.items() if name not in checked.gone}
        self._turns.update(dict.fromkeys(checked.ran, self._before.runs))
        self.tally.found_before.update(self._earlier & set(checked.still))
        for name in self._earlier.intersection(checked.undecided):
            self.tally.unjudged[f"the example of {name}, which an earlier run found"] += 1
        self.tally.gone += checked.gone
        self.tally.examples = (len(checked.ran), len(checked.ran) + checked.left)
        self._suspects += [(None, judged) for judged in checked.changed]


def _key(discovery: Discovery) -> object:
    """Return a key that discoveries of one defect share."""
    return discovery.key if discovery.confirmed else ("unconfirmed", discovery.signature)


def _reason(judged: JudgedCase) -> Reason | None:
    if judged.verdict is Verdict.PASS:
        return None
    judgement, looks = judged.judgement, tuple(map(str, judged.signature or ()))
    refused = judged.finding is not None and judged.finding.refused
    return Reason(opening(judgement.why if looks else judgement.reason, _REASON_LENGTH), looks, refused=refused)
