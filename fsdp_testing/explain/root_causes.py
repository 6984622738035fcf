"""Groups the failures of a run by root cause, and puts one explanation on the findings that belong to each.

Findings of one implementation that look alike are candidates for one cause. One of each such set is reduced to its shortest
schedule. Another finding belongs to the same cause if that schedule, taken from its own program, shows the same failure on its
own model and strategy, or if its own shortest schedule has the same shape. The hypotheses for both must not contradict one
another. For the same parameter, model and strategy it is enough that the program contains the schedule.
A reduced failure is described in one or two sentences: schedule, wrong quantity, error, and pattern.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_testing.cases.records import (
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
from fsdp_testing.explain.contributions import of_program, sentence
from fsdp_testing.explain.hypotheses import Hypothesis, contradict, kinds_text
from fsdp_testing.explain.inquiry import WRONG_NUMBERS, Inquiry, JudgeSettings
from fsdp_testing.explain.shrinking.shrink import NOT_EXAMINED, Budget, shorten, with_schedule
from fsdp_testing.explain.trace.portrait import portrait_of
from fsdp_testing.explain.trace.run import Trace
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.checkers.event_rules import unsharded_before
from fsdp_testing.judging.checkers.explain import listed, ranks_text
from fsdp_testing.judging.signature import FineSignature, Signature, fine_signature_of, signature_of
from fsdp_testing.oracle.quantities import Comparison

REDUCIBLE = frozenset(FailureKind) - LOSES_RANKS
"""Kinds of findings that are cheap to run again; a death or hang costs a world and a deadline."""


_PATIENCE = 5.0
_TIMES_SLOWEST = 10.0
"""A rank that runs for so many seconds at least, and so many times as long as the slowest case of the run, hangs: whoever runs
what failed again and again cannot wait as long for each as a check does."""

HowOf = Callable[[str], JudgeSettings | None]
"""How a check judges, by its name; None for a check that is not decided by one program at a time."""


@dataclass(slots=True)
class _Failing:
    """A finding, and its position among the results."""

    result: int
    number: int
    finding: Finding
    how: JudgeSettings | None


@dataclass(slots=True)
class _RootCause:
    """A root cause in the making.

    Attributes:
        label: Unique for an implementation.
        explanation: Explanation of the reduced finding.
        hypothesis: What its wrong numbers are equal to, if that was found.
        members: The findings that belong to it.
    """

    label: str
    explanation: Explanation
    hypothesis: Hypothesis | None = None
    members: list[_Failing] = field(default_factory=list)

    @property
    def shape(self) -> tuple[str, ...]:
        return _shape(self.explanation.case)

    def contained(self, finding: Finding) -> bool:
        """Whether the program of a finding contains the schedule, up to the failure; only for a fully reduced schedule."""
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
        results: The results of a run.
        how_of: The way in which each check judges.
        runner: Runs programs.
        seconds: For the failures of one implementation, in seconds of an idle machine; a finding says if it was not reached.
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
            causes = explainer.causes(_places(results, name, how_of))
        except Exception as error:  # noqa: BLE001 - a run of an hour must not be lost over the explanation of its failures
            why = f"{name}: failures are not explained: {type(error).__name__}: {error}"
            warnings.warn(why, RuntimeWarning, stacklevel=2)
            continue
        for cause in causes:
            for number, failing in enumerate(cause.members):
                shortest = cause.explanation if number == 0 else None
                changed[failing.result, failing.number] = replace(failing.finding, cause=cause.label, shortest=shortest)
        for failing in explainer.left if seconds > 0 else ():
            changed[failing.result, failing.number] = replace(failing.finding, unexplained=NOT_EXAMINED)
    return tuple(
        replace(
            result,
            findings=tuple(changed.get((index, number), finding) for number, finding in enumerate(result.findings)),
        )
        for index, result in enumerate(results)
    )


def _places(results: Sequence[CheckResult], name: str, how_of: HowOf) -> list[_Failing]:
    """Findings that can be reduced, unexpected failures first and short programs before long ones."""
    places = [
        _Failing(index, number, finding, how_of(result.check))
        for index, result in enumerate(results)
        for number, finding in enumerate(result.findings)
        if result.implementation == name and finding.kind in REDUCIBLE and finding.case.program
    ]
    return sorted(places, key=lambda p: (results[p.result].verdict is not Verdict.FAIL, len(p.finding.case.program)))


def cause_of(runner: CaseRunner, implementation: str, case: Case) -> str:
    """Return what one process would have to do to give the wrong numbers of a case, as a clause; empty if unknown.

    The case is judged as the fuzzer judges it: everything is compared, freely, or in lockstep in low precision.
    """
    how = JudgeSettings(Comparison(lockstep=case.low_precision))
    finding = runner.judge(implementation, case, how.comparison, closely=True).finding
    if finding is None:
        return ""
    inquiry = Inquiry(runner, implementation)
    like, cast = inquiry.cause(finding, how, inquiry.hypothesis(finding, how, None))
    what = cast or ("" if like is None else clause(finding.case, like, {}))
    return "; ".join(filter(None, (what, inquiry.module(finding, how))))


def happened(inquiry: Inquiry, finding: Finding, how: JudgeSettings) -> str:
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
    _added_up: list[_RootCause] = field(default_factory=list)
    """Causes with known terms of wrong gradients: the same terms mean the same cause, whatever the finding looks like."""

    def causes(self, places: Sequence[_Failing]) -> list[_RootCause]:
        """Return every root cause found, each with the findings that belong to it."""
        by_look: dict[Signature, list[_RootCause]] = {}
        by_place: dict[FineSignature, list[_RootCause]] = {}
        for failing in places:
            fine = fine_signature_of(failing.finding)
            same_place = by_place.setdefault(fine, [])
            cause = next((candidate for candidate in same_place if candidate.contained(failing.finding)), None)
            if cause is None:
                if self._budget.exhausted:
                    self.left.append(failing)
                    continue
                # One defect may make ranks disagree about replicated values, and show as a divergence if each rank holds a part.
                kind = FailureKind.DIVERGED if fine.alike.kind in WRONG_NUMBERS else fine.alike.kind
                alike = by_look.setdefault(fine.alike._replace(kind=kind), [])
                cause = self._same(failing, alike) or self._new(failing, alike)
                same_place.append(cause)
            cause.members.append(failing)
        return [cause for causes in by_look.values() for cause in causes]

    def _judge(self, how: JudgeSettings) -> Callable[[Case], Finding | None]:
        def judge(case: Case) -> Finding | None:
            judged = self._inquiry.judge(case, how)
            return judged.finding

        return judge

    def _same(self, failing: _Failing, causes: Sequence[_RootCause]) -> _RootCause | None:
        """The cause whose schedule shows this failure too, with numbers that do not contradict it.

        Wrong gradients may look different (None, other numbers, different on each rank) and still be the same wrong sum.
        """
        if failing.how is None:
            return None
        gradient = failing.finding.sort == "gradient"
        elsewhere = [candidate for candidate in self._added_up if gradient and candidate not in causes]
        for cause in (*causes, *elsewhere):
            for case in with_schedule(failing.finding.case, cause.explanation.case.program):
                result, hypothesis = self._judge(failing.how)(case), cause.hypothesis
                alike = result is not None and signature_of(result) == signature_of(failing.finding)
                if result is None or not (alike or (cause in elsewhere and result.sort == "gradient")):
                    continue
                like = None if hypothesis is None else self._inquiry.hypothesis(result, failing.how, None)
                if (alike or like is not None) and not contradict(like, hypothesis):
                    return cause
        return None

    def _new(self, failing: _Failing, causes: list[_RootCause]) -> _RootCause:
        """The cause of a failure that is reduced now: a new one, unless its schedule equals that of a known cause."""
        if failing.how is None:
            return self._as_it_is(failing.finding, causes)
        budget = self._budget.part()
        short, complete = shorten(failing.finding, self._judge(failing.how), budget)
        case = short.case
        reached = not self._budget.exhausted
        traced = self._inquiry.traced(short) if reached else None
        like = self._inquiry.hypothesis(short, failing.how, traced) if reached else None
        alike = [*causes, *(candidate for candidate in self._added_up if like is not None and like.contributions)]
        for candidate in alike:
            if candidate.shape == _shape(case) and not contradict(like, candidate.hypothesis):
                return candidate
        like, cast = self._inquiry.cause(short, failing.how, like) if reached else (None, "")
        unsharded = _unsharded(traced, like)
        explanation = Explanation(
            sentence=render(short, like, unsharded, cast) + ("" if reached else f" Its cause was {NOT_EXAMINED}."),
            schedule=tuple(_lines(case.program)),
            case=case,
            left_out=len(failing.finding.case.program) - len(case.program),
            runs=budget.runs,
            seconds=budget.seconds,
            complete=complete,
            place=NOT_EXAMINED if self._budget.exhausted else self._inquiry.module(short, failing.how),
            portrait=portrait_of(traced) if traced is not None and self._draw else None,
            happened=cast or ("" if like is None else clause(case, like, unsharded)),
        )
        return self._cause(short, explanation, causes, like)

    def _as_it_is(self, finding: Finding, causes: list[_RootCause]) -> _RootCause:
        """A failure of a check with its own judge: reported, not reduced."""
        sentence = (
            f"{render(finding, None, {})} The check judges several runs together, so the schedule is not shortened."
        )
        schedule = tuple(_lines(finding.case.program))
        whole = Explanation(sentence, schedule, finding.case, left_out=0, runs=0, seconds=0.0, complete=False)
        return self._cause(finding, whole, causes)

    def _cause(
        self, finding: Finding, explanation: Explanation, causes: list[_RootCause], hypothesis: Hypothesis | None = None
    ) -> _RootCause:
        kind, sort, operation = signature_of(finding)
        label = f"{kind}: {sort} in {operation} ({' > '.join(_shape(explanation.case))})"
        cause = _RootCause(label if not causes else f"{label}, number {len(causes) + 1}", explanation, hypothesis)
        causes.append(cause)
        if hypothesis is not None and hypothesis.contributions is not None:
            self._added_up.append(cause)
        return cause


def _shape(case: Case) -> tuple[str, ...]:
    return tuple(operation.shape() for operation in case.program)


def _lines(program: Sequence[Operation]) -> Iterator[str]:
    for index, operation in enumerate(program):
        yield operation.text(index).removeprefix("operation ")


UnshardedUnits = Mapping[str, tuple[int, ...]]


def render(finding: Finding, like: Hypothesis | None, unsharded: UnshardedUnits, cast: str = "") -> str:
    """Return the account of a finding on its shortest schedule.

    Args:
        finding: The finding; its case is the shortest one.
        like: The hypothesis for the wrong numbers.
        unsharded: Units that were gathered when the operation without effect began, with the ranks on which they were.
        cast: Which cast gives these numbers, in mixed precision; empty if none does.
    """
    case = finding.case
    schedule = listed([operation.words() for operation in case.program[: finding.operation + 1]], "then")
    after = f"After {schedule}" if schedule else "While building and wrapping the model"
    if finding.kind in RAISES:
        return f"{after}: {finding.statement}"
    wrong = f"{after}: {_what_is_wrong(finding)}"
    if cast:
        return f"{after}: {cast}; {_what_is_wrong(finding)}, and equals one process's result with that cast."
    if like is None:
        return f"{wrong}."
    if like.pattern is not None:
        return f"{wrong}, and is {like.pattern.words}{_where(like)}."
    return f"{after}: {clause(case, like, unsharded)}; {_what_is_wrong(finding)}, {_equal_to(case, like)}."


def _what_is_wrong(finding: Finding) -> str:
    if finding.max_error is None:
        # Without the place, which the schedule has just named.
        return finding.statement or finding.explanation
    size = f"max error {finding.max_error:.3g}"
    if finding.bound is not None:
        size += f", bound {finding.bound:.2g}" if finding.bound else ", expected equal bits"
    where = "" if " on rank " in finding.quantity or not finding.ranks else f" on {ranks_text(finding.ranks)}"
    return f"{finding.quantity} is wrong{where} ({size})"


def clause(case: Case, like: Hypothesis, unsharded: UnshardedUnits) -> str:
    """Return what happened, without the schedule and the numbers."""
    if like.contributions is not None:
        return sentence(like.contributions, case.world.size, of_program(case))
    if like.pattern is not None:
        return f"the wrong values are {like.pattern.words}{_where(like)}"
    if like.happened:
        return f"{like.happened}{_where(like)}"
    operation = case.program[like.left_out]
    name = f"operation {like.left_out}, {operation.words()}"
    if like.kinds == {"result"} and operation.writes_parameters:
        if unsharded:
            place = ranks_text(tuple(sorted({rank for ranks in unsharded.values() for rank in ranks})))
            verb = "holds" if len(unsharded) == 1 else "hold"
            return f"{units_text(tuple(unsharded))} still {verb} the weights from before {name}, on {place}"
        return f"the weights from before {name}, are still in use"
    return f"{name}, had no effect on {kinds_text(like.kinds)}{_where(like)}"


def _where(like: Hypothesis) -> str:
    return f" on {ranks_text(like.ranks)}" if like.ranks else ""


def _equal_to(case: Case, like: Hypothesis) -> str:
    if like.contributions is not None:
        return "and equals, within the bound, one process's terms added in that way"
    if like.happened:
        return f"and {like.confirmed}"
    text = case.program[like.left_out].text(like.left_out)
    for_whom = f" for {units_text(like.units)}" if like.units else ""
    return f"and is what one process gives without {text}{for_whom}"


def units_text(units: tuple[str, ...]) -> str:
    """Return units in words; the root has no name."""
    if units == ("",):
        return "the root unit"
    noun = "unit" if len(units) == 1 else "units"
    return f"{noun} {listed([f'`{unit}`' if unit else '(root)' for unit in units])}"
