"""Planted faults are reduced to what shows them and explained by their cause, checked against one process."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import pytest

from fsdp_testing.cases.records import (
    Batch,
    Case,
    CheckResult,
    Clip,
    Explanation,
    FailureKind,
    Finding,
    Forward,
    History,
    Judgement,
    ModelSpec,
    Step,
    UnitEvent,
    Verdict,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.checks.conformance import run_conformance
from fsdp_testing.errors import PoolBroken, WorldFailed
from fsdp_testing.explain.inquiry import Inquiry, JudgeSettings
from fsdp_testing.explain.root_causes import explain_results
from fsdp_testing.explain.shrinking import shrink
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.event_rules import unsharded_before
from fsdp_testing.oracle.quantities import Comparison

GENEROUS = 300.0


def explained(name: str, *checks: str) -> list[Finding]:
    report = run_conformance(name, checks=checks, world_sizes=(2,), explain=GENEROUS)
    assert report.count(Verdict.FAIL) == len(checks), [r.explanation for r in report.results]
    return [finding for result in report.results for finding in result.findings]


def the_explanation(findings: list[Finding]) -> Explanation:
    shortest = [finding.shortest for finding in findings if finding.shortest is not None]
    assert len(shortest) == 1, [one.sentence for one in shortest]
    assert all(finding.cause for finding in findings)
    return shortest[0]


def test_a_failure_of_a_trace_is_shortened():
    """Programs that are observed after every operation are traced, too: else each of them seems to pass."""
    explanation = the_explanation(explained("faults_trace:ReducesTwice", "trace.reductions_needed"))
    assert [operation.kind for operation in explanation.case.program] == ["forward_backward"]


def table(text: str) -> list[list[str]]:
    """Rows of a text whose fields are parted by bars; a field may begin on the next line."""
    rows = text.replace("|\n", "|").strip().splitlines()
    return [[field.strip() for field in row.split("|")] for row in rows]


CAUSES = """
faults_gradients:SumForMean | training.gradients_are_means | is 2 times the right values, as if the sum over
faults_gradients:OneRankIgnored | training.gradients_are_means | lacks the inputs of rank 1;
faults_gradients:LastLocalLost | accumulation.no_sync_then_reduced | lacks operation 1, forward-backward in no_sync;
faults_gradients:RescaledEachTime | accumulation.no_sync_then_reduced | counts operation 0, forward-backward in no_sync, 1/2 t
faults_gradients:ZeroGradByShape | zero_grad.both_forms | (and of 5 more) lacks every term;
faults_gradients:WeightedByRows | training.empty_batches | by the 1 rank that contributes instead of all 2
faults_gradients:FirstCallOnly | shared.module_called_twice | is 1/2 of the right values, as if its 2 uses were averaged
faults_gradients:StaleGradientOfUnused | unused.sometimes | still counts the inputs of rank 0, which was cleared, twice
faults_gradients:NotReduced | training.gradients_are_means | on rank 0 comes from this rank's inputs alone, not reduced over
stale_adapter:KEEPS_OLD_WEIGHTS | forward_only.eval | the weights from before operation
stale_adapter:KEEPS_ONE_UNIT | forward_only.eval | unit `layers.1` still holds the weights from before operation 2
"""


@pytest.mark.parametrize(("name", "check", "expected"), table(CAUSES))
def test_the_cause_is_named(name: str, check: str, expected: str) -> None:
    # A unit that stays gathered is a finding of its own besides.
    findings = [finding for finding in explained(name, check) if finding.kind is not FailureKind.KEPT]
    explanation = the_explanation(findings)
    assert expected in explanation.sentence, explanation.sentence
    assert "bound" in explanation.sentence
    assert explanation.complete
    assert explanation.left_out > 0
    assert len(explanation.schedule) == len(explanation.case.program)


def test_one_root_cause_shows_once_over_several_checks() -> None:
    checks = ("training.gradients_are_means", "training.sgd_momentum", "zero_grad.both_forms")
    findings = explained("faults_gradients:SumForMean", *checks)
    assert len({finding.cause for finding in findings}) == 1
    the_explanation(findings)


def test_two_root_causes_show_twice() -> None:
    findings = explained("stale_adapter:TWO_FAULTS", "forward_only.eval", "accumulation.no_sync_then_reduced")
    assert len({finding.cause for finding in findings}) == 2


def test_an_exception_is_reduced_too() -> None:
    findings = explained("faults_state:NOT_IMPLEMENTED", "clipping.norm_2")
    explanation = the_explanation(findings)
    assert "clip(" in explanation.schedule[-1]
    assert "it claims clip_grad_norm, but every rank raised NotImplementedError: clipping is" in explanation.sentence
    assert re.search(r", at \S+toy\.py:\d+$|, at \S+faults_state\.py:\d+$", explanation.sentence)


def test_nothing_is_changed_without_time_and_no_verdict_ever() -> None:
    report = run_conformance("faults_gradients:SumForMean", checks=("training.gradients_are_means",), explain=0.0)
    (result,) = report.results
    assert all(finding.shortest is None and not finding.cause for finding in result.findings)
    runner = CaseRunner()
    (unexplained,) = explain_results((result,), lambda check: JudgeSettings(Comparison()), runner, 0.0)
    assert unexplained == result
    (done,) = explain_results((result,), lambda check: JudgeSettings(Comparison()), runner, GENEROUS)
    stripped = tuple(replace(finding, cause="", shortest=None) for finding in done.findings)
    assert replace(done, findings=stripped) == result


def test_a_death_is_not_run_again_and_again() -> None:
    report = run_conformance("faults_gradients:SumForMean", checks=("training.gradients_are_means",), explain=0.0)
    dead = replace(report.results[0].findings[0], kind="died")
    result = replace(report.results[0], findings=(dead,))
    assert isinstance(result, CheckResult)
    assert explain_results((result,), lambda check: JudgeSettings(Comparison()), CaseRunner(), GENEROUS) == (result,)


def test_what_is_held_when_an_operation_begins() -> None:
    def event(operation: int, unit: str, transition: str) -> UnitEvent:
        return UnitEvent(0, 0.0, operation, unit, transition)

    one = (event(0, "a", "gather"), event(0, "a", "free"), event(1, "b", "gather"), event(2, "b", "free"))
    other = (event(0, "a", "gather"), event(1, "b", "gather"))
    history = History((one, other))
    assert unsharded_before(history, 2) == {"b": (0, 1), "a": (1,)}
    assert unsharded_before(history, 3) == {"a": (1,), "b": (1,)}
    assert unsharded_before(history, 0) == {}


class TwoDefects:
    """Stands in for a runner: outputs are wrong after two looks around a step on one strategy, or right after a clip."""

    def __init__(self) -> None:
        self.judged: list[Case] = []

    def impatient(self, timeout: float) -> TwoDefects:
        return self

    def judge(self, name: str, case: Case, comparison: Comparison, **_how: object) -> JudgedCase:
        self.judged.append(case)
        kinds = " ".join(operation.kind for operation in case.program)
        stale = case.strategy == "full_shard" and re.search(r"forward.* step.* forward$", kinds)
        found = wrong_output(case) if stale or kinds.endswith("clip forward") else None
        return JudgedCase(case, Judgement(Verdict.PASS, found))

    def on_ranks(self, function: object, *arguments: object, size: int, backend: str = "gloo") -> list[object]:
        raise WorldFailed("nothing can be traced here")

    def observe(self, name: str, case: Case, *, observe_all: bool) -> tuple[object, ...]:
        raise PoolBroken("nothing can be observed here")


def wrong_output(case: Case) -> Finding:
    last = len(case.program) - 1
    text = f"after operation {last}: loss on rank 0 is off by 1 (bound 1e-9)"
    return Finding("diverged", "loss on rank 0", last, f"operation {last}", (0,), text, case, 1.0, 1e-9)


def a_result(name: str, *findings: Finding) -> CheckResult:
    return CheckResult("torch-fsdp1", name, "a claim", (), Verdict.FAIL, findings=findings)


def test_failures_that_look_alike_are_put_together_only_if_one_schedule_shows_both() -> None:
    look = Forward(Batch(1), "eval")
    base = Case(ModelSpec("mlp"), WorldSpec(2), (look, Step(), ZeroGrad(), look))
    again = replace(base, model=ModelSpec("deep_nest"), program=(ZeroGrad(), look, ZeroGrad(), Step(), look))
    other = replace(base, strategy="no_shard", program=(look, Step(), Clip(1.0), look))
    results = (
        a_result("a.b", wrong_output(base)),
        a_result("c.d", wrong_output(other)),
        a_result("e.f", wrong_output(again)),
    )
    runner = TwoDefects()
    done = explain_results(results, lambda check: JudgeSettings(Comparison()), runner, GENEROUS)  # type: ignore[arg-type]
    first, second, third = (result.findings[0] for result in done)
    assert first.cause == third.cause != second.cause
    assert [finding.shortest is not None for finding in (first, second, third)] == [True, True, False]
    assert second.shortest is not None
    assert [line.partition("(")[0] for line in second.shortest.schedule] == ["0 clip", "1 forward"]
    assert len(runner.judged) < 30


def test_failures_in_one_place_have_one_cause_only_if_both_hold_its_schedule() -> None:
    """The same output of the same model under the same strategy: one is stale after a step, the other wrong after a clip."""
    look = Forward(Batch(1), "eval")
    stale = Case(ModelSpec("mlp"), WorldSpec(2), (look, Step(), look))
    clipped = replace(stale, program=(look, ZeroGrad(), ZeroGrad(), Clip(1.0), look))
    again = replace(stale, program=(ZeroGrad(), look, ZeroGrad(), Step(), ZeroGrad(), look))
    findings = [wrong_output(case) for case in (stale, clipped, again)]
    results = [a_result(f"a.{number}", finding) for number, finding in enumerate(findings)]
    runner = TwoDefects()
    done = explain_results(results, lambda check: JudgeSettings(Comparison()), runner, GENEROUS)  # type: ignore[arg-type]
    first, second, third = (result.findings[0].cause for result in done)
    assert first == third != second


def test_a_failure_is_traced_on_the_devices_that_it_was_seen_on() -> None:
    """Else a failure that is known by the units that were gathered is new on any other device than the CPU."""
    worlds: list[tuple[int, str]] = []

    class Traced(CaseRunner):
        def on_ranks(self, function: object, *arguments: object, size: int, backend: str = "gloo") -> list[object]:
            worlds.append((size, backend))
            raise WorldFailed("nothing can be traced here")

    look = Forward(Batch(1), "eval")
    for backend in ("gloo", "sim"):
        case = Case(ModelSpec("mlp"), WorldSpec(2, backend), (look, Step(), look))
        assert Inquiry(Traced(), "torch-fsdp2").traced(wrong_output(case)) is None
    assert worlds == [(2, "gloo"), (2, "sim")]


def test_the_budget_is_runs_and_what_it_does_not_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: the clock of this one goes an hour for each run."""
    look = Forward(Batch(1), "eval")
    stale = Case(ModelSpec("mlp"), WorldSpec(2), (look, Step(), look))
    results = [
        a_result("a.b", wrong_output(stale)),
        a_result("c.d", wrong_output(replace(stale, model=ModelSpec("deep_nest")))),
    ]
    clock = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    done = explain_results(results, lambda check: JudgeSettings(Comparison()), TwoDefects(), 10.0)  # type: ignore[arg-type]
    assert [finding.unexplained for result in done for finding in result.findings] == ["", ""]
    assert done[0].findings[0].shortest is not None
    assert done[0].findings[0].shortest.complete
    runs = 1 / shrink.RUNS_PER_SECOND
    done = explain_results(results, lambda check: JudgeSettings(Comparison()), TwoDefects(), runs)  # type: ignore[arg-type]
    assert [finding.unexplained for result in done for finding in result.findings] == ["", "not examined (time)"]
    assert done[0].findings[0].shortest is not None
    assert not done[0].findings[0].shortest.complete


class Hangs(TwoDefects):
    """Whatever is shorter hangs."""

    def judge(self, name: str, case: Case, comparison: Comparison, **_how: object) -> JudgedCase:
        self.judged.append(case)
        hung = replace(wrong_output(case), kind=FailureKind.HUNG)
        return JudgedCase(case, Judgement(Verdict.FAIL, hung))


def test_a_program_that_hangs_uses_up_the_budget_as_the_time_that_it_costs() -> None:
    look = Forward(Batch(1), "eval")
    stale = Case(ModelSpec("mlp"), WorldSpec(2), (ZeroGrad(), look, ZeroGrad(), Step(), ZeroGrad(), look))
    runner = Hangs()
    (done,) = explain_results(
        [a_result("a.b", wrong_output(stale))],
        lambda check: JudgeSettings(Comparison()),
        runner,  # type: ignore[arg-type]
        10.0,
    )
    assert len(runner.judged) == 10 * shrink.RUNS_PER_SECOND // shrink.RUNS_OF_A_HANG == 2
    assert done.findings[0].shortest is not None
    assert not done.findings[0].shortest.complete


class FirstLook(TwoDefects):
    """The output is wrong after a step that a look at batch 7 came before."""

    def judge(self, name: str, case: Case, comparison: Comparison, **_how: object) -> JudgedCase:
        words = " ".join("seven" if getattr(o, "batch", None) == Batch(7) else o.kind for o in case.program)
        found = wrong_output(case) if re.search(r"seven.* step.* forward$", words) else None
        return JudgedCase(case, Judgement(Verdict.PASS, found))


def test_one_cause_shows_once_where_its_schedule_is_found_only_by_shortening() -> None:
    """Of several looks the last is taken when a schedule is looked for in another program; here the first is to blame."""
    look = Forward(Batch(1), "eval")
    base = Case(ModelSpec("mlp"), WorldSpec(2), (Forward(Batch(7)), Step(), look))
    other = replace(base, model=ModelSpec("deep_nest"), program=(Forward(Batch(7), "no_grad"), look, Step(), look))
    results = (a_result("a.b", wrong_output(base)), a_result("c.d", wrong_output(other)))
    done = explain_results(results, lambda check: JudgeSettings(Comparison()), FirstLook(), GENEROUS)  # type: ignore[arg-type]
    first, second = (result.findings[0] for result in done)
    assert first.cause == second.cause
    assert second.shortest is None


def test_failures_that_one_schedule_shows_are_two_causes_if_their_numbers_differ_in_kind() -> None:
    findings = explained("stale_adapter:TWO_MEANS", "training.gradients_are_means")
    causes = {finding.cause: finding.case.strategy == "no_shard" for finding in findings}
    assert len(causes) == 2
    sentences = [finding.shortest.sentence for finding in findings if finding.shortest is not None]
    assert sum("lacks the inputs of rank 1" in one for one in sentences) == 1
    assert sum("is 2 times the right values" in one for one in sentences) == 1


def test_the_cast_that_was_made_instead_is_named() -> None:
    findings = explained("faults_state:WrongReduceDtype", "mixed_precision.reduce_float32")
    sentence = the_explanation(findings).sentence
    assert "reduced in bfloat16, not in float32" in sentence
    assert "expected equal bits" in sentence
    assert sentence.endswith("and equals one process's result with that cast.")


# The first two give bits that a reduction in bfloat16 would give, too; none was on the wire.
DONE_INSTEAD = """
faults_gradients:AddsUpInComputeDtype | mixed_precision.local_sums |
    local micro-batches are added up in bfloat16, not in float32
faults_models:AccumulatesReduced | mixed_precision.accumulated |
    the wrong values are the right values, rounded to bfloat16
faults_around:HookResultIgnored | comm_hook.result_is_kept |
    what the communication hook returns has no effect
faults_around:PartialGradientsStay | exceptions.repeatedly |
    the gradient of layers.2.weight (and of 1 more) still contains operation 0, interrupt, which was cleared
faults_gradients:UnusedGetsZeros | unused.gradient_is_none |
    parameters that no rank used get gradients of zeros
faults_memory:GatherNotAwaited | training.sgd_momentum |
    the result of a collective is read before it was waited for
faults_schedules:ZerosAreNone | zero_grad.then_step |
    operation 1, zero_grad, works as if set_to_none=True were asked for, not False
faults_saving:LoadsOnFirstRank | full_state_dict.fresh_instance |
    operation 0, reload, does not load the wrong values: the new model's own values stay on rank 1
faults_state:FirstRankWritesOnly | summon.edits_are_kept |
    operation 0, edit_full_parameters, had no effect on parameters on rank 1
"""


@pytest.mark.parametrize(("name", "check", "happened"), table(DONE_INSTEAD))
def test_what_was_done_instead_is_named(name: str, check: str, happened: str) -> None:
    shortest = [finding.shortest for finding in explained(name, check) if finding.shortest is not None]
    assert [one.happened for one in shortest] == [happened]
    assert happened.removeprefix("the wrong values are ") in shortest[0].sentence


def test_of_other_casts_nothing_is_said_when_none_gives_the_numbers() -> None:
    """A gradient that is a hundredth too large in recomputed modules is no cast at all."""
    findings = explained("faults_around:RecomputesInFull", "activation_checkpointing.mixed_precision")
    assert all("is due" not in f.shortest.sentence for f in findings if f.shortest is not None)


def test_a_check_with_a_judge_of_its_own_is_told_and_not_reduced() -> None:
    """What three worlds hand to one another cannot be cut down operation by operation; each cause still has a sentence."""
    findings = explained("faults_saving:StateNotMoved", "optim_state.other_world_size")
    told = [finding.shortest for finding in findings if finding.shortest is not None]
    assert told
    for explanation in told:
        assert explanation.sentence.startswith("After forward-backward")
        assert explanation.left_out == explanation.runs == 0
        assert explanation.case.program
