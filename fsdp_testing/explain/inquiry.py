"""Runs a failure again with instrumentation, and asks the oracle for variants of it.

Where the casts of wrong numbers are known one by one, it replays the same operations, each from the implementation's own state,
with other casts: gradients reduced in another dtype, local micro-batches added up in one, divided at another place, or nothing
computed in a lower one. At two ranks equality is to the bit, so agreement identifies the cause. The dtype of a reduction must
also have been seen on the wire, because another defect may give the same bits. If no cast agrees, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import (
    RAISES,
    UNIT_ROUNDOFF,
    Case,
    FailureKind,
    Finding,
    MixedPrecisionSpec,
    RankObservation,
    Verdict,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.explain.compared_pieces import compared_pieces
from fsdp_testing.explain.hypotheses import Hypothesis, Sources, WrongNumbers
from fsdp_testing.explain.modules import first_wrong_module
from fsdp_testing.explain.shrinking.shrink import RUNS_OF_A_HANG
from fsdp_testing.explain.trace.run import Trace, trace
from fsdp_testing.judging.case_runner import ORDINARY, CaseRunner, JudgedCase, RunMode
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.event_rules import unsharded_before
from fsdp_testing.judging.numbers import compare_numbers
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.oracle import assemble, rank_jobs
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.gradient_terms import GradientTerm
from fsdp_testing.oracle.module_values import WatchedObservation
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.rank_jobs import Otherwise
from fsdp_testing.oracle.setup import as_observed, division_of


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How the cases of a check are judged.

    Attributes:
        comparison: How observations are compared with the oracle.
        mode: How cases run, if they need more than a plain run.
    """

    comparison: Comparison
    mode: RunMode = ORDINARY


WRONG_NUMBERS = (FailureKind.DIVERGED, FailureKind.DISAGREED)


@dataclass(slots=True)
class Inquiry:
    """Asks about the failures of one implementation.

    Args:
        runner: Runs programs.
        name: The implementation.
        draw: Whether to draw traces.
        count: Told how many runs were made.
    """

    _runner: CaseRunner
    _name: str
    _draw: bool = False
    _count: Callable[[int], None] = lambda _: None
    _expectations: dict[str, Expectation] = field(default_factory=dict)

    def judge(self, case: Case, how: JudgeSettings) -> JudgedCase:
        """Run a case as its check does, with a snapshot after every operation."""
        judged = self._runner.judge(self._name, case, how.comparison, closely=True, mode=how.mode)
        hung = judged.finding is not None and judged.finding.kind == FailureKind.HUNG
        self._count(RUNS_OF_A_HANG if hung else 1)
        return judged

    def _on_ranks(self, function: Callable[..., Any], *args: Any, size: int, backend: str = "gloo") -> list[Any]:
        self._count(1)
        return self._runner.on_ranks(function, *args, size=size, backend=backend)

    def hypothesis(self, finding: Finding, how: JudgeSettings, traced: Trace | None) -> Hypothesis | None:
        """What the wrong numbers are equal to; the trace shows which units were unsharded."""
        if finding.kind not in WRONG_NUMBERS:
            return None

        def unsharded(operation: int) -> dict[str, tuple[str, ...]]:
            if traced is None:
                return {}
            names = dict(traced.units[0])
            return {unit: names.get(unit, ()) for unit in unsharded_before(traced.history, operation)}

        with suppress(HarnessError):  # an oracle that cannot run a variant leaves the failure without a hypothesis
            ranks = self._ranks(finding.case, how)
            comparison = as_observed(how.comparison, registry.adapter_of(self._name))
            adopted = assemble.states(ranks) if comparison.lockstep else None
            plain = self._oracle if adopted is None else partial(self._lockstep, adopted=adopted)
            sources = Sources(
                oracle=partial(self._expected, mode=how.mode, plain=plain),
                terms=partial(self._terms, adopted=adopted),
                starts=self._starts,
                besides=(how.mode.besides, plain) if how.mode.besides else None,
                claimed=registry.adapter_of(self._name).claimed(finding.case.world.tensor_parallel),
            )
            return WrongNumbers(how.mode.seen_as(finding.case), ranks, comparison, sources).hypothesis(unsharded)
        return None

    def cause(self, finding: Finding, how: JudgeSettings, like: Hypothesis | None) -> tuple[Hypothesis | None, str]:
        """Return the hypothesis for the wrong numbers, and the cast that gives them, in words."""
        # A cast that gives exactly these numbers says more than a pattern.
        cast = self._cast(finding, how) if like is None or like.pattern is not None else ""
        return (self._luck(finding, how) if like is None and not cast else like), cast

    def _luck(self, finding: Finding, how: JudgeSettings) -> Hypothesis | None:
        """Whether the failure vanishes if results arrive at once, or if fresh memory is not filled with garbage."""
        if finding.kind not in WRONG_NUMBERS or how.mode != ORDINARY:
            return None
        for late, garbage, what in (
            (False, True, "the result of a collective is read before it was waited for"),
            (True, False, "memory is read before it is written"),
        ):
            lucky = self.judge(finding.case, replace(how, mode=RunMode(rank_jobs.run_luckily, (late, garbage))))
            if lucky.outcome.verdict is not Verdict.PASS:
                continue
            again = self.judge(finding.case, how).finding
            if again is not None and signature_of(again) == signature_of(finding):
                return Hypothesis(-1, frozenset(), happened=what, confirmed="is right where chance helps")
        return None

    def _ranks(self, case: Case, how: JudgeSettings) -> Sequence[RankObservation]:
        """What ranks report of a case as the check runs it, with a snapshot after every operation."""
        ranks = self.judge(case, how).ranks
        if len(ranks) < case.world.size:
            raise HarnessError("some ranks reported nothing")
        return ranks

    def _expected(self, case: Case, mode: RunMode, plain: Callable[[Case], Expectation]) -> Expectation:
        if mode.expect is None:
            return plain(case)
        expected: Expectation = self._on_ranks(mode.expect, case, True, *mode.expect_arguments, size=1)[0]
        return expected

    def _cast(self, finding: Finding, how: JudgeSettings) -> str:
        """The dtype or place that was used instead, if the casts of the wrong numbers are known one by one."""
        case = how.mode.seen_as(finding.case)
        decidable = how.comparison.lockstep or (case.mixed_precision is None and case.model.dtype != "float64")
        if finding.kind not in WRONG_NUMBERS or how.mode.expect is not None or not decidable:
            return ""
        with suppress(HarnessError):  # an oracle that cannot run a variant leaves the failure without a cause
            ranks, adapter = self._ranks(finding.case, how), registry.adapter_of(self._name)

            def reduced_in() -> set[str]:
                world = finding.case.world
                found = self._on_ranks(
                    rank_jobs.reducing_dtypes, self._name, finding.case, size=world.size, backend=world.backend
                )
                return set().union(*found)

            return other_cast(
                case,
                ranks,
                replace(as_observed(how.comparison, adapter), lockstep=True),
                partial(self._lockstep, adopted=assemble.states(ranks)),
                reduced_in=reduced_in if how.mode.seen_as(finding.case) == finding.case else lambda: set(UNIT_ROUNDOFF),
                division=division_of(case, adapter),
            )
        return ""

    def module(self, finding: Finding, how: JudgeSettings) -> str:
        """The first module with wrong numbers; empty if none shows, or if the failure vanishes when modules are watched."""
        if finding.kind not in WRONG_NUMBERS or how.mode != ORDINARY:
            return ""
        with suppress(HarnessError):  # a case that cannot be watched is explained without modules
            case, watched = finding.case, RunMode(job=rank_jobs.run_watched)
            judged = self.judge(case, replace(how, mode=watched))
            ranks = [rank for rank in judged.ranks if isinstance(rank, WatchedObservation)]
            same = judged.finding is not None and signature_of(judged.finding) == signature_of(finding)
            if not same or len(ranks) < case.world.size:
                return ""
            adopted = assemble.states(ranks) if how.comparison.lockstep else None
            expected = self._on_ranks(rank_jobs.expect_modules, case, self._name, adopted, size=1)[0]
            truth = self._oracle(case) if adopted is None else self._lockstep(case, adopted=adopted)
            comparison = as_observed(how.comparison, registry.adapter_of(self._name))
            wrong = compare_numbers(case, truth, ranks, comparison).tally.divergences
            return first_wrong_module(case, finding.operation, expected, [rank.modules or {} for rank in ranks], wrong)
        return ""

    def _lockstep(
        self, case: Case, otherwise: rank_jobs.Otherwise | None = None, *, adopted: Mapping[int, GatheredState]
    ) -> Expectation:
        arguments = (case, self._name, adopted, otherwise)
        expected: Expectation = self._on_ranks(rank_jobs.expect_lockstep, *arguments, size=1)[0]
        return expected

    def traced(self, finding: Finding) -> Trace | None:
        """The ranks' actions in the case of a finding; None if it cannot be traced."""
        claimed = "unit_trace" in registry.adapter_of(self._name).capabilities
        if not claimed or finding.kind in RAISES:
            return None
        with suppress(HarnessError):  # a case that cannot be traced is explained without a trace
            traced = trace(self._name, finding.case, self._on_ranks)
            # The first run of a schedule connects and allocates, which must not be in the drawing.
            return trace(self._name, finding.case, self._on_ranks) if self._draw else traced
        return None

    def _oracle(self, case: Case) -> Expectation:
        if case.identity not in self._expectations:
            self._expectations[case.identity] = self._on_ranks(rank_jobs.expect_free, case, True, size=1)[0]
        return self._expectations[case.identity]

    def _starts(self, case: Case, new: bool) -> Sequence[Mapping[str, torch.Tensor]]:
        if not (new or case.wrapping.sync_module_states):
            return ()
        starts: Sequence[Mapping[str, torch.Tensor]] = self._on_ranks(rank_jobs.first_values, case, new, size=1)[0]
        return starts

    def _terms(self, case: Case, last: int, adopted: Mapping[int, GatheredState] | None) -> Sequence[GradientTerm]:
        terms: Sequence[GradientTerm] = self._on_ranks(rank_jobs.gradient_terms, case, last, adopted, size=1)[0]
        return terms


LockstepOracle = Callable[[Case, Otherwise], Expectation]
"""Replays a case in one process, from the state that the implementation was in before each operation."""

_AS_SAID = Otherwise()


@dataclass(frozen=True, slots=True)
class _Cast:
    """A possible cast: in words, as a case, as a kind of replay, and the dtype that it needs on the wire."""

    words: str
    precision: MixedPrecisionSpec
    otherwise: Otherwise = _AS_SAID
    wire: str = ""


def other_cast(
    case: Case,
    ranks: Sequence[RankObservation],
    comparison: Comparison,
    oracle: LockstepOracle,
    *,
    reduced_in: Callable[[], Collection[str]],
    division: Division | None = None,
) -> str:
    """Return which cast gives the numbers of the first divergence, in words; empty if none does."""
    divergences = agreement.compare(oracle(case, _AS_SAID), ranks, comparison).divergences
    wrong = {divergence.quantity for divergence in divergences}
    for cast in _others(case, division) if wrong else ():
        expected = oracle(replace(case, mixed_precision=cast.precision), cast.otherwise)
        points = (p for p in expected.points if p.index == divergences[0].index and wrong <= set(p.quantities))
        pieces = [piece for point in points for piece in compared_pieces(ranks, point, wrong)]
        agrees = bool(pieces) and not any(piece.wrong for piece in pieces)
        if agrees and {piece.quantity for piece in pieces} == wrong and (not cast.wire or cast.wire in reduced_in()):
            return cast.words
    return ""


def _others(case: Case, division: Division | None) -> Iterator[_Cast]:
    precision, stored = case.mixed_precision or MixedPrecisionSpec(), case.model.dtype
    wire = precision.reduce_dtype or precision.param_dtype or stored
    computed = precision.param_dtype or stored
    if UNIT_ROUNDOFF[computed] > UNIT_ROUNDOFF[wire]:
        words = f"local micro-batches are added up in {computed}, not in {wire}"
        yield _Cast(words, precision, Otherwise(sums=computed))
    for dtype in dict.fromkeys((precision.param_dtype, stored, "float32", "bfloat16", "float16")):
        if dtype is not None and dtype != wire:
            words = f"gradients are reduced in {dtype}, not in {wire}"
            yield _Cast(words, replace(precision, reduce_dtype=dtype), wire=dtype)
    for before, after in ((float(case.world.size), 1.0), (1.0, float(case.world.size))):
        if division is not None and (division.before, division.after) != (before, after):
            when = "before the sum over ranks" if after == 1.0 else "after the sum over ranks"
            words = f"gradients are divided {when}; the adapter says otherwise"
            yield _Cast(words, precision, Otherwise(division=Division(before, after)))
    if precision.param_dtype is not None:
        full = replace(precision, param_dtype=None, reduce_dtype=wire)
        yield _Cast(f"forward and backward run in {stored}, not in {precision.param_dtype}", full)
    if precision.buffer_dtype is not None:
        uncast = replace(precision, buffer_dtype=None)
        yield _Cast(f"buffers are not cast to {precision.buffer_dtype}", uncast)
