"""Investigates a failing case: runs it alone, compares it with known failures, and shrinks it if it is new.

Every search does this, and keeps the results in `Causes`: a known failure need not run alone to be counted.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fsdp_testing.cases.records import ENDS_RANKS, Case, FailureKind, Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import HarnessError
from fsdp_testing.explain.inquiry import WRONG_NUMBERS
from fsdp_testing.explain.root_causes import cause_of
from fsdp_testing.explain.shrinking.shrink import Attempt, shrink
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.judging.signature import Signature

_HUNG_SECONDS = 5.0
"""Seconds after which a case counts as hung while it shrinks; the final case is confirmed with the campaign's deadline."""

_PLACE_ALONE = "`"
"""Beginning of a cause that names the first module with wrong numbers, and not what the numbers are."""


def attempts_on(runner: CaseRunner, name: str) -> Attempt:
    """Return the runner of shrinking attempts for an implementation; a single death or hang counts without confirmation."""

    def attempt(cases: Sequence[Case], wanted: Signature) -> list[tuple[Case, Signature | None]]:
        until = wanted if wanted.kind in ENDS_RANKS else None
        impatient = runner.impatient(_HUNG_SECONDS if wanted.kind == FailureKind.HUNG else None)
        results = impatient.judge_batch(name, cases, Watch(operations=True), until=until)
        return [(result.case, result.signature) for result in results]

    return attempt


def told_apart(case: Case) -> Case:
    """Return the case with different numbers in each micro-batch: with equal ones, a stale and a doubled gradient look alike."""
    seeds = itertools.count(1)
    renumbered = (operation.with_batches(lambda batch: replace(batch, seed=next(seeds))) for operation in case.program)
    return replace(case, program=tuple(renumbered))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A case that failed among others.

    Attributes:
        case: The case.
        signature: The signature of the failure.
        reason: The first fact that differs.
        account: The fate of the ranks, if one was lost.
    """

    case: Case
    signature: Signature
    reason: str
    account: str = ""

    @staticmethod
    def of(judged: JudgedCase) -> Suspect:
        """Return the suspect of a judgement that fails."""
        assert judged.signature is not None
        return Suspect(judged.case, judged.signature, judged.judgement.why, judged.judgement.account)


class Causes:
    """The known causes of failures, and their signatures in a batch.

    Attributes:
        rules: Known failures, and a rule of each confirmed discovery.
    """

    def __init__(self, rules: KnownFailures) -> None:
        self.rules = rules
        self._names: dict[Signature, set[str]] = {}

    def by_looks(self, signature: Signature, case: Case, at: int | None = None) -> Rule | None:
        """Return the rule of a failure that had this signature in a batch, and another one alone."""
        return self.rules.fitting(self._names.get(signature, ()), case, at)

    def learn(self, signature: Signature, name: str) -> None:
        """Record that the failure of a rule may have this signature in a batch."""
        self._names.setdefault(signature, set()).add(name)

    def add(self, discovery: Discovery, signature: Signature) -> Rule:
        """Add and return the rule of a confirmed discovery, which had this signature in a batch."""
        rule = discovery.rule()
        self.rules = self.rules.with_rule(rule)
        self.learn(signature, rule.name)
        return rule


def explained(runner: CaseRunner, implementation: str, case: Case) -> str:
    """Return what the wrong numbers of a case are equal to; empty if that is unknown, or a world is lost on the way."""
    try:
        with suppress(HarnessError):
            return cause_of(runner, implementation, told_apart(case)) or cause_of(runner, implementation, case)
    except Exception as error:  # noqa: BLE001 - a campaign of an hour must not be lost over an explanation
        why = f"{implementation}: a finding is not explained: {type(error).__name__}: {error}"
        warnings.warn(why, RuntimeWarning, stacklevel=2)
    return ""


@dataclass(frozen=True, slots=True)
class Investigated:
    """The result of an investigation: a discovery, a known failure, or neither.

    Attributes:
        signature: Its signature in a batch.
        discovery: The finding; not confirmed if it passes alone.
        known: The matching known failure.
    """

    signature: Signature
    discovery: Discovery | None = None
    known: Rule | None = None


@dataclass(frozen=True, slots=True)
class Investigator:
    """Confirms and shrinks suspects of one campaign.

    Attributes:
        name: The implementation.
        shape: Gives the legal case nearest to a reduced one.
        fair: Whether the implementation may be asked a case.
        seconds: Time for shrinking one.
    """

    name: str
    shape: Callable[[Case], Case]
    fair: Callable[[Case], bool]
    seconds: float

    def investigate(self, runner: CaseRunner, suspect: Suspect, known: KnownFailures) -> Investigated | None:
        """Return what a suspect is; None if it cannot be judged alone."""
        met_as = suspect.signature
        watch = Watch(operations=True, models=met_as.kind == FailureKind.LEAKED)
        # This run already repeats the failure of the batch.
        (alone,) = runner.impatient().judge_batch(self.name, [suspect.case], watch)
        signature = alone.signature
        if signature is None:
            if alone.verdict is not Verdict.PASS:
                return None
            once = Discovery(self.name, met_as, suspect.case, suspect.case, suspect.reason, suspect.account, False)
            return Investigated(met_as, once)
        rule = self._recognized(runner, alone, known)
        if rule is not None:
            return Investigated(met_as, known=rule)
        attempts = attempts_on(runner, self.name)
        shrunk = shrink(suspect.case, signature, attempts, self.shape, self.fair, self.seconds)
        (last,) = runner.impatient().judge_batch(self.name, [shrunk.case], watch)
        if last.signature != signature and shrunk.case != suspect.case:
            # A shorter case that passes does not refute the failure of the whole one.
            (last,) = runner.impatient().judge_batch(self.name, [suspect.case], watch)
        confirmed = last.signature == signature
        kept = last if confirmed else alone
        discovery = Discovery(
            self.name,
            signature,
            suspect.case,
            kept.case,
            kept.judgement.why,
            kept.judgement.account,
            confirmed,
            shrunk.attempts,
            shrunk.seconds,
            kept.judgement.overrun,
            explained(runner, self.name, kept.case) if confirmed and signature.kind in WRONG_NUMBERS else "",
        )
        # While shrinking, it may have turned into a known failure.
        again = self.known_as(runner, kept, known, discovery.cause) if confirmed else None
        return Investigated(met_as, discovery, again)

    def known_as(self, runner: CaseRunner, judged: JudgedCase, known: KnownFailures, cause: str) -> Rule | None:
        """Return the rule that matches a failure with this cause, or without whose cause it passes."""
        assert judged.signature is not None
        cause = judged.judgement.cause if judged.judgement.cause is not None else cause
        rule = known.recognize(judged.signature, judged.features, cause)
        if rule is None and (not cause or cause.startswith(_PLACE_ALONE)):
            return self._gone_without(runner, judged, known)
        return rule

    def _gone_without(self, runner: CaseRunner, kept: JudgedCase, known: KnownFailures) -> Rule | None:
        """The rule that matches the simplest case, if that case passes without the rule's cause."""
        assert kept.signature is not None
        for rule in known.recognizing(kept.signature, kept.features):
            variant = rule.variant(kept.case)
            variant = None if variant is None else self.shape(variant)
            if variant is None or variant == kept.case or not self.fair(variant):
                continue
            (without,) = runner.impatient().judge_batch(self.name, [variant], Watch(operations=True))
            if without.verdict is Verdict.PASS:
                return rule
        return None

    def _recognized(self, runner: CaseRunner, alone: JudgedCase, known: KnownFailures) -> Rule | None:
        """The rule that matches a failure, by its cause if the rule names one."""
        signature, judgement = alone.signature, alone.judgement
        assert signature is not None
        rule = known.recognize(signature, alone.features, judgement.cause)
        if rule is None or judgement.cause is not None or not rule.asks_cause(signature):
            return rule
        return known.recognize(signature, alone.features, explained(runner, self.name, alone.case))


AT_FIRST = 3
AT_FIRST_OF_LISTED = 20
"""Of failures that look alike: each listed case decides the exit code."""
LATER_ONE_IN = 25


class LookAlikes:
    """The failures that a campaign has met, by what they look like.

    Args:
        at_first: How many of a group are investigated in any case.
    """

    def __init__(self, at_first: int = AT_FIRST) -> None:
        self._at_first = at_first
        self._met: Counter[Signature] = Counter()
        self._found: set[Signature] = set()
        self._by_rule: Counter[str] = Counter()

    def must_be_investigated(self, signature: Signature) -> bool:
        """Count one more failure that no rule knows; return whether to investigate it.

        As long as all of a group were known failures, the next may be new, and nothing would show it.
        """
        self._met[signature] += 1
        return _is_one_of_few(self._met[signature], self._at_first) or signature not in self._found

    def asks_cause(self, rule: str) -> bool:
        """Count one more failure that looks like a rule; return whether to ask its cause."""
        self._by_rule[rule] += 1
        return _is_one_of_few(self._by_rule[rule], AT_FIRST)

    def add_finding(self, signature: Signature) -> None:
        """Note that the campaign reports a finding that looks so in a batch: more of them need no investigation."""
        self._found.add(signature)


def _is_one_of_few(number: int, at_first: int) -> bool:
    return number <= at_first or number % LATER_ONE_IN == 0
