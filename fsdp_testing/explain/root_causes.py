"""Why do the checks of a run fail? One explanation for each root cause, put on the findings it belongs to.

Findings of one implementation that look alike are candidates for one cause. Of each such set one is reduced to its
shortest schedule. Another one belongs to the same cause if that schedule, taken from its own program, shows the same
failure on its own model and strategy, or if it is itself reduced to a schedule of the same shape; and if the wrong
numbers of both are not known to be equal to different things. Of findings in the same place (parameter, model, strategy)
it is enough that the program holds the schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fsdp_testing.cases.records import (
    LOSES_RANKS,
    Case,
    CheckResult,
    Explanation,
    FailureKind,
    Finding,
    Operation,
    Verdict,
)
from fsdp_testing.explain.hypotheses import Hypothesis, contradict
from fsdp_testing.explain.inquiry import WRONG_NUMBERS, How, Inquiry
from fsdp_testing.explain.rendering import clause, render
from fsdp_testing.explain.shrinking.shrink import NOT_EXAMINED, Budget, shorten, with_schedule
from fsdp_testing.explain.trace.portrait import portrait_of
from fsdp_testing.explain.trace.run import Trace
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.checkers.lifecycle import unsharded_before
from fsdp_testing.judging.signature import FineSignature, Signature, fine_signature_of, signature_of
from fsdp_testing.oracle.comparison import Comparison

REDUCIBLE = frozenset(FailureKind) - LOSES_RANKS
"""Kinds of findings that may be run again often; each death or hang costs a world and a deadline."""


_PATIENCE = 5.0
_TIMES_SLOWEST = 10.0
"""A rank that runs for so many seconds at least, and so many times as long as the slowest case of the run, hangs: whoever runs
what failed again and again cannot wait as long for each as a check does."""

HowOf = Callable[[str], How | None]
"""How a check judges, by its name; None for a check that is not decided by one program at a time."""


@dataclass(slots=True)
class _Failing:
    """A finding, and where it stands among the results."""

    result: int
    number: int
    finding: Finding
    how: How | None


@dataclass(slots=True)
class _Cause:
    """A root cause in the making.

    Attributes:
        label: Unique for an implementation.
        explanation: Of the finding that was reduced.
        hypothesis: What its wrong numbers are equal to, if that was found.
        members: The findings that belong to it.
    """

    label: str
    explanation: Explanation
    hypothesis: Hypothesis | None = None
    members: list[_Failing] = field(default_factory=list)

    @property
    def shape(self) -> tuple[str, ...]:
        """The kinds of operations of its schedule."""
        return _shape(self.explanation.case)

    def contained(self, finding: Finding) -> bool:
        """Whether the program of a finding holds the schedule, up to where it fails; asked of one fully reduced only."""
        if finding.operation < 0 or not self.explanation.complete:
            return True
        begun = replace(finding.case, program=finding.case.program[: finding.operation + 1])
        return next(with_schedule(begun, self.explanation.case.program), None) is not None


def explain_results(
    results: Sequence[CheckResult],
    how_of: HowOf,
    runner: CaseRunner,
    seconds: float,
    *,
    draw: bool = False,
) -> tuple[CheckResult, ...]:
    """Return the results with an explanation on one finding of each root cause.

    Args:
        results: What a run gave.
        how_of: How each check judges.
        runner: Runs programs.
        seconds: For the failures of one implementation, in seconds of an idle machine; of what is not reached a finding says so.
        draw: Take a portrait of each shortest schedule, where the implementation can be traced.
    """
    changed: dict[tuple[int, int], Finding] = {}
    patience = max(
        _PATIENCE, _TIMES_SLOWEST * max((case.seconds for result in results for case in result.cases), default=0.0)
    )
    for name in dict.fromkeys(result.implementation for result in results):
        budget = Budget.of_seconds(seconds)
        try:
            explainer = _Explainer(Inquiry(runner.impatient(patience), name, draw, budget.count), budget, draw)
            found = explainer.causes(_places(results, name, how_of))
        except Exception as error:  # noqa: BLE001 - a run of an hour must not be lost over the explanation of its failures
            why = f"{name}: failures are not explained: {type(error).__name__}: {error}"
            warnings.warn(why, RuntimeWarning, stacklevel=2)
            continue
        for cause in found:
            for number, place in enumerate(cause.members):
                shortest = cause.explanation if number == 0 else None
                changed[place.result, place.number] = replace(place.finding, cause=cause.label, shortest=shortest)
        for place in explainer.left if seconds > 0 else ():
            changed[place.result, place.number] = replace(place.finding, unexplained=NOT_EXAMINED)
    return tuple(
        replace(
            result,
            findings=tuple(changed.get((index, number), finding) for number, finding in enumerate(result.findings)),
        )
        for index, result in enumerate(results)
    )


def _places(results: Sequence[CheckResult], name: str, how_of: HowOf) -> list[_Failing]:
    """Findings that can be reduced, unexpected failures first and short programs before long ones."""
    found = [
        _Failing(index, number, finding, how_of(result.check))
        for index, result in enumerate(results)
        for number, finding in enumerate(result.findings)
        if result.implementation == name and finding.kind in REDUCIBLE and finding.case.program
    ]
    return sorted(found, key=lambda p: (results[p.result].verdict is not Verdict.FAIL, len(p.finding.case.program)))


def cause_of(runner: CaseRunner, implementation: str, case: Case) -> str:
    """Return what one process would have to do to give the wrong numbers of a case, as a clause; empty if unknown.

    The case is judged as the fuzzer judges it: everything is compared, freely, or in lockstep in mixed precision.
    """
    how = How(Comparison(lockstep=case.mixed_precision is not None))
    finding = runner.judge(implementation, case, how.comparison, closely=True).finding
    if finding is None:
        return ""
    inquiry = Inquiry(runner, implementation)
    like, cast = inquiry.cause(finding, how, inquiry.hypothesis(finding, how, None))
    what = cast or ("" if like is None else clause(finding.case, like, {}))
    return "; ".join(filter(None, (what, inquiry.module(finding, how))))


def happened(inquiry: Inquiry, finding: Finding, how: How) -> str:
    """Return what was done wrong in the case of a finding as its check ran it, as a clause; empty if unknown.

    It depends on the case alone: not on time, nor on other failures.
    """
    traced = inquiry.traced(finding)
    like, cast = inquiry.cause(finding, how, inquiry.hypothesis(finding, how, traced))
    return cast or ("" if like is None else clause(finding.case, like, _unsharded(traced, like)))


def _unsharded(traced: Trace | None, like: Hypothesis | None) -> dict[str, tuple[int, ...]]:
    """The units that were gathered when the operation without effect began."""
    return unsharded_before(traced.history, like.left_out) if traced is not None and like is not None else {}


@dataclass(slots=True)
class _Explainer:
    """Explains the failures of one implementation."""

    _inquiry: Inquiry
    _budget: Budget
    _draw: bool
    left: list[_Failing] = field(default_factory=list)
    """Failures that the budget did not reach."""
    _added_up: list[_Cause] = field(default_factory=list)
    """Causes of which it is known what wrong gradients are the sum of: the same sum is the same cause, however it looks."""

    def causes(self, places: Sequence[_Failing]) -> list[_Cause]:
        """Return every root cause found, each with the findings that belong to it."""
        found: dict[Signature, list[_Cause]] = {}
        known: dict[FineSignature, list[_Cause]] = {}
        for place in places:
            fine = fine_signature_of(place.finding)
            here = known.setdefault(fine, [])
            cause = next((one for one in here if one.contained(place.finding)), None)
            if cause is None:
                if self._budget.exhausted:
                    self.left.append(place)
                    continue
                # Where ranks hold the same, they may disagree in what diverges where each holds a part.
                kind = FailureKind.DIVERGED if fine.alike.kind in WRONG_NUMBERS else fine.alike.kind
                alike = found.setdefault(fine.alike._replace(kind=kind), [])
                cause = self._same(place, alike) or self._new(place, alike)
                here.append(cause)
            cause.members.append(place)
        return [cause for causes in found.values() for cause in causes]

    def _judge(self, how: How) -> Callable[[Case], Finding | None]:
        def judge(case: Case) -> Finding | None:
            asked = self._inquiry.judge(case, how)
            return asked.finding

        return judge

    def _same(self, place: _Failing, causes: Sequence[_Cause]) -> _Cause | None:
        """The cause whose schedule shows this failure too, with numbers that do not contradict it.

        Wrong gradients may look different (None, other numbers, not alike on all ranks) and be the same wrong sum.
        """
        if place.how is None:
            return None
        others = [one for one in self._added_up if one not in causes] if place.finding.sort == "gradient" else []
        for cause in (*causes, *others):
            for case in with_schedule(place.finding.case, cause.explanation.case.program):
                found, known = self._judge(place.how)(case), cause.hypothesis
                alike = found is not None and signature_of(found) == signature_of(place.finding)
                if found is None or not (alike or (cause in others and found.sort == "gradient")):
                    continue
                like = None if known is None else self._inquiry.hypothesis(found, place.how, None)
                if (alike or like is not None) and not contradict(like, known):
                    return cause
        return None

    def _new(self, place: _Failing, causes: list[_Cause]) -> _Cause:
        """The cause of a failure that is reduced now: a new one, unless it ends where another one did."""
        if place.how is None:
            return self._as_it_is(place.finding, causes)
        budget = self._budget.part()
        short, complete = shorten(place.finding, self._judge(place.how), budget)
        case = short.case
        reached = not self._budget.exhausted
        traced = self._inquiry.traced(short) if reached else None
        like = self._inquiry.hypothesis(short, place.how, traced) if reached else None
        alike = [*causes, *(known for known in self._added_up if like is not None and like.contributions)]
        for known in alike:
            if known.shape == _shape(case) and not contradict(like, known.hypothesis):
                return known
        like, cast = self._inquiry.cause(short, place.how, like) if reached else (None, "")
        unsharded = _unsharded(traced, like)
        explanation = Explanation(
            sentence=render(short, like, unsharded, cast) + ("" if reached else f" Its cause was {NOT_EXAMINED}."),
            schedule=tuple(_lines(case.program)),
            case=case,
            left_out=len(place.finding.case.program) - len(case.program),
            runs=budget.runs,
            seconds=budget.seconds,
            complete=complete,
            place=NOT_EXAMINED if self._budget.exhausted else self._inquiry.module(short, place.how),
            portrait=portrait_of(traced) if traced is not None and self._draw else None,
            happened=cast or ("" if like is None else clause(case, like, unsharded)),
        )
        return self._cause(short, explanation, causes, like)

    def _as_it_is(self, finding: Finding, causes: list[_Cause]) -> _Cause:
        """A failure of a check that judges in a way of its own: reported, not reduced."""
        sentence = f"{render(finding, None, {})} The check judges several runs together, so that none is shortened."
        schedule = tuple(_lines(finding.case.program))
        whole = Explanation(sentence, schedule, finding.case, left_out=0, runs=0, seconds=0.0, complete=False)
        return self._cause(finding, whole, causes)

    def _cause(
        self, finding: Finding, explanation: Explanation, causes: list[_Cause], hypothesis: Hypothesis | None = None
    ) -> _Cause:
        kind, sort, operation = signature_of(finding)
        label = f"{kind}: {sort} in {operation} ({' > '.join(_shape(explanation.case))})"
        cause = _Cause(label if not causes else f"{label}, number {len(causes) + 1}", explanation, hypothesis)
        causes.append(cause)
        if hypothesis is not None and hypothesis.contributions is not None:
            self._added_up.append(cause)
        return cause


def _shape(case: Case) -> tuple[str, ...]:
    return tuple(operation.shape() for operation in case.program)


def _lines(program: Sequence[Operation]) -> Iterator[str]:
    for index, operation in enumerate(program):
        yield operation.text(index).removeprefix("operation ")
