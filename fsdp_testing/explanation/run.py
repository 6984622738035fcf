"""Why do the checks of a run fail? One explanation for each root cause, put on the findings it belongs to.

Findings of one implementation that look alike are candidates for one cause. Of each such set one is reduced to its
shortest schedule; another belongs to the same cause if that schedule, taken from its own program, shows the same failure
on its own model and strategy. What is never run is never said to be the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fsdp_testing.checkers import gathered_state
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.lifecycle import unsharded_before
from fsdp_testing.checkers.quantities import Expectation
from fsdp_testing.errors import HarnessError
from fsdp_testing.explanation.budget import Budget
from fsdp_testing.explanation.casts import OtherCast, other_cast
from fsdp_testing.explanation.likeness import Likeness, WrongNumbers
from fsdp_testing.explanation.shortest import shorten, with_schedule
from fsdp_testing.explanation.telling import tell
from fsdp_testing.implementations import registry
from fsdp_testing.judging.case_runner import ORDINARY, CaseRunner, RunMode
from fsdp_testing.judging.signature import FineSignature, Signature, fine_signature_of, signature_of
from fsdp_testing.programs import jobs
from fsdp_testing.programs.fitting import as_observed
from fsdp_testing.records import (
    LOSES_RANKS,
    RAISES,
    Case,
    CheckResult,
    Explanation,
    FailureKind,
    Finding,
    Operation,
    Verdict,
)
from fsdp_testing.trace.portrait import portrait_of
from fsdp_testing.trace.run import Trace, trace_on

REDUCIBLE = frozenset(FailureKind) - LOSES_RANKS
"""Kinds of findings that may be run again often; each death or hang costs a world and a deadline."""


@dataclass(frozen=True, slots=True)
class How:
    """How the cases of a check are judged.

    Attributes:
        comparison: How observations are compared with the oracle.
        mode: How cases are run, where they are not run as they are.
    """

    comparison: Comparison
    mode: RunMode = ORDINARY


_NUMBERS = (FailureKind.DIVERGED, FailureKind.DISAGREED)

HowOf = Callable[[str], How | None]
"""How a check judges, by its name; None for a check that is not decided by one program at a time."""


@dataclass(slots=True)
class _Place:
    """A finding, and where it stands among the results."""

    result: int
    number: int
    finding: Finding
    how: How | None


@dataclass(slots=True)
class _Cause:
    """A root cause in the making: its label, what it was told from, and the findings that belong to it."""

    label: str
    explanation: Explanation
    members: list[_Place] = field(default_factory=list)


def explain_results(
    results: Sequence[CheckResult],
    how_of: HowOf,
    runner: CaseRunner,
    seconds: float,
    *,
    draw: bool = False,
) -> tuple[CheckResult, ...]:
    """Returns the results with an explanation on one finding of each root cause.

    Args:
        results: What a run gave.
        how_of: How each check judges.
        runner: Runs programs.
        seconds: Time for the failures of one implementation; what is not reached stays unexplained.
        draw: Take a portrait of each shortest schedule, where the implementation can be traced.
    """
    changed: dict[tuple[int, int], Finding] = {}
    for name in dict.fromkeys(result.implementation for result in results):
        explainer = _Explainer(runner, name, Budget(seconds, runs=10**9), draw=draw)
        try:
            found = explainer.causes(_places(results, name, how_of))
        except Exception as error:  # noqa: BLE001 - a run of an hour must not be lost over how its failures are told
            told = f"{name}: failures are not explained: {type(error).__name__}: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
            continue
        for cause in found:
            for number, place in enumerate(cause.members):
                shortest = cause.explanation if number == 0 else None
                changed[place.result, place.number] = replace(place.finding, cause=cause.label, shortest=shortest)
    return tuple(
        replace(
            result,
            findings=tuple(changed.get((index, number), finding) for number, finding in enumerate(result.findings)),
        )
        for index, result in enumerate(results)
    )


def _places(results: Sequence[CheckResult], name: str, how_of: HowOf) -> list[_Place]:
    """Findings that can be reduced, unexpected failures first and short programs before long ones."""
    found: list[tuple[bool, int, _Place]] = []
    for index, result in enumerate(results):
        if result.implementation != name:
            continue
        how = how_of(result.check)
        for number, finding in enumerate(result.findings):
            if finding.kind in REDUCIBLE and finding.case.program:
                expected = result.verdict is not Verdict.FAIL
                place = _Place(index, number, finding, how)
                found.append((expected, len(finding.case.program), place))
    return [place for _, _, place in sorted(found, key=lambda item: item[:2])]


class _Explainer:
    """Explains the failures of one implementation."""

    def __init__(self, runner: CaseRunner, name: str, budget: Budget, *, draw: bool) -> None:
        self._runner = runner
        self._name = name
        self._budget = budget
        self._draw = draw
        self._expectations: dict[str, Expectation] = {}

    def causes(self, places: Sequence[_Place]) -> list[_Cause]:
        """Every root cause found, each with the findings that belong to it."""
        found: dict[Signature, list[_Cause]] = {}
        known: dict[FineSignature, _Cause] = {}
        for place in places:
            fine = fine_signature_of(place.finding)
            cause = known.get(fine)
            if cause is None:
                if self._budget.exhausted:
                    continue
                alike = found.setdefault(fine.alike, [])
                cause = self._same(place, alike) or self._new(place, alike)
                known[fine] = cause
            cause.members.append(place)
        return [cause for causes in found.values() for cause in causes]

    def _judge(self, how: How) -> Callable[[Case], Finding | None]:
        def judge(case: Case) -> Finding | None:
            asked = self._runner.judge(self._name, case, how.comparison, closely=True, mode=how.mode)
            return asked.finding

        return judge

    def _same(self, place: _Place, causes: Sequence[_Cause]) -> _Cause | None:
        """The cause whose schedule shows this failure too."""
        if place.how is None:
            return None
        for cause in causes:
            for case in with_schedule(place.finding.case, cause.explanation.case.program):
                found = self._judge(place.how)(case)
                if found is not None and signature_of(found) == signature_of(place.finding):
                    return cause
        return None

    def _new(self, place: _Place, causes: list[_Cause]) -> _Cause:
        if place.how is None:
            return self._as_it_is(place.finding, causes)
        budget = self._budget.part()
        short = shorten(place.finding, self._judge(place.how), budget)
        case = short.finding.case
        like, traced = self._look(short.finding, place.how)
        cast = self._cast(short.finding, place.how) if like is None else None
        held = unsharded_before(traced.history, like.left_out) if traced is not None and like is not None else {}
        explanation = Explanation(
            sentence=tell(short.finding, like, held, cast),
            schedule=tuple(_lines(case.program)),
            case=case,
            left_out=len(place.finding.case.program) - len(case.program),
            runs=budget.runs,
            seconds=budget.seconds,
            complete=short.complete,
            portrait=portrait_of(traced) if traced is not None and self._draw else None,
        )
        return self._cause(short.finding, explanation, causes)

    def _as_it_is(self, finding: Finding, causes: list[_Cause]) -> _Cause:
        """A failure of a check that judges in a way of its own: told, not reduced."""
        sentence = f"{tell(finding, None, {})} The check judges several runs together, so that none is shortened."
        schedule = tuple(_lines(finding.case.program))
        told = Explanation(sentence, schedule, finding.case, left_out=0, runs=0, seconds=0.0, complete=False)
        return self._cause(finding, told, causes)

    def _cause(self, finding: Finding, explanation: Explanation, causes: list[_Cause]) -> _Cause:
        kind, sort, operation = signature_of(finding)
        schedule = " > ".join(step.shape() for step in explanation.case.program)
        label = f"{kind}: {sort} in {operation} ({schedule})"
        cause = _Cause(label if not causes else f"{label}, number {len(causes) + 1}", explanation)
        causes.append(cause)
        return cause

    def _look(self, finding: Finding, how: How) -> tuple[Likeness | None, Trace | None]:
        """What the wrong numbers are like, and how the shortest schedule runs."""
        traced = self._traced(finding)
        if finding.kind not in _NUMBERS or how.mode != ORDINARY:
            return None, traced

        def held(operation: int) -> dict[str, tuple[str, ...]]:
            if traced is None:
                return {}
            names = dict(traced.units[0])
            return {unit: names.get(unit, ()) for unit in unsharded_before(traced.history, operation)}

        with suppress(HarnessError):  # an oracle that cannot run a variant leaves the failure as it is told
            ranks = self._runner.observe(self._name, finding.case, observe_all=True)
            comparison = as_observed(how.comparison, registry.load(self._name))
            return WrongNumbers(finding.case, ranks, comparison, self._oracle).like(held), traced
        return None, traced

    def _cast(self, finding: Finding, how: How) -> OtherCast | None:
        """In which dtype it was done instead, where a case in mixed precision has wrong numbers."""
        numbers = finding.kind in _NUMBERS and how.mode == ORDINARY
        if not (numbers and how.comparison.lockstep and finding.case.mixed_precision is not None):
            return None
        with suppress(HarnessError):  # an oracle that cannot run a variant leaves the failure as it is told
            ranks = self._runner.observe(self._name, finding.case, observe_all=True)
            adopted = gathered_state.states(ranks)

            def oracle(case: Case) -> Expectation:
                told: Expectation = self._runner.on_ranks(jobs.expect_lockstep, case, self._name, adopted, size=1)[0]
                return told

            return other_cast(finding.case, ranks, as_observed(how.comparison, registry.load(self._name)), oracle)
        return None

    def _traced(self, finding: Finding) -> Trace | None:
        claimed = "unit_trace" in registry.load(self._name).capabilities
        if not claimed or finding.kind in RAISES or finding.case.world.backend != "gloo":
            return None
        with suppress(HarnessError):  # what cannot be traced is told without it
            traced = trace_on(self._runner.on_ranks, self._name, finding.case)
            # The first run of a schedule connects and allocates; nobody wants that drawn.
            return trace_on(self._runner.on_ranks, self._name, finding.case) if self._draw else traced
        return None

    def _oracle(self, case: Case) -> Expectation:
        if case.identity not in self._expectations:
            self._expectations[case.identity] = self._runner.on_ranks(jobs.expect_free, case, True, size=1)[0]
        return self._expectations[case.identity]


def _lines(program: Sequence[Operation]) -> Iterator[str]:
    for index, operation in enumerate(program):
        yield operation.text(index).removeprefix("operation ")
