"""A case is judged on real ranks: exactly repeatable, and no crash, hang or fault of our own becomes a verdict."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from fsdp_testing.adapters import registry
from fsdp_testing.cases.operations import TrainElsewhere
from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    Finding,
    ForwardBackward,
    ModelSpec,
    Observe,
    Step,
    Verdict,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.case_runner import CaseRunner, RunMode
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.judging.judge import Judgement
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Comparison
from fsdp_testing.ranks.pool import Pool

PROGRAM = (ForwardBackward(Batch(0)), Observe(), Step(), ZeroGrad(), ForwardBackward(Batch(1)))


def case(model="mlp", size=2, program=PROGRAM, strategy="no_shard"):
    return Case(ModelSpec(model), WorldSpec(size), program, strategy=strategy)


def test_what_every_judged_rank_runs_is_imported_ahead_of_it(monkeypatch):
    pool, imported = Pool(), set()
    monkeypatch.setattr(pool, "note", lambda _key, _outcome, modules: imported.update(modules))
    runner = CaseRunner(pool)
    assert runner.judge("fsdp_ref-composable", case(strategy="full_shard")).verdict is Verdict.PASS
    assert not [name for name in imported if name.startswith(("fsdp_testing.", "fsdp_ref.runtime"))]
    pool.close()


@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
def test_groups_that_a_case_needs_are_made_once_and_its_ranks_stay(strategy):
    elsewhere = (TrainElsewhere(Batch(1), ranks=1),)
    program, world = ((), WorldSpec(4, mesh=(2, 2))) if strategy == "hybrid_shard" else (elsewhere, WorldSpec(2))
    pool = Pool()
    runner = CaseRunner(pool)
    asked = Case(ModelSpec("mlp"), world, (*PROGRAM, *program), strategy=strategy)
    try:
        pids = [runner.on_ranks(os.getpid, size=world.size)]
        for seed in (1, 2):
            judged = runner.judge("fsdp_ref-wrapper", replace(asked, seed=seed))
            assert judged.verdict is Verdict.PASS, judged.judgement
            pids.append(runner.on_ranks(os.getpid, size=world.size))
    finally:
        pool.close()
    assert pids[0] == pids[1] == pids[2]


@pytest.mark.parametrize("comparison", [Comparison(), Comparison(lockstep=True)])
@pytest.mark.parametrize(
    ("name", "asked"), [("single-process", ["narrow"]), ("faults_gradients:SumForMean", ["narrow", "wide"])]
)
def test_what_agrees_within_the_narrowest_bounds_takes_no_further_replay(monkeypatch, comparison, name, asked):
    jobs: list[str] = []
    runner, ask_oracle = CaseRunner(), CaseRunner._ask_oracle

    def noting(self, job, arguments, case):
        # The last argument of the lockstep's job is whether it is displaced, that of the free one whether it is narrow.
        narrow = arguments[-1] is not (job is rank_jobs.expect_lockstep)
        jobs.append("narrow" if narrow else "wide")
        return ask_oracle(self, job, arguments, case)

    monkeypatch.setattr(CaseRunner, "_ask_oracle", noting)
    judged = runner.judge(name, case(strategy="no_shard" if name == "single-process" else "full_shard"), comparison)
    assert judged.verdict is (Verdict.PASS if len(asked) == 1 else Verdict.FAIL), judged.judgement
    assert list(dict.fromkeys(jobs)) == asked


def numbers(ranks):
    for rank in ranks:
        for result in rank.results:
            yield from result.values.values()
        for snapshot in rank.snapshots:
            for parameter in snapshot.parameters.values():
                yield from (piece.value for piece in (*parameter.pieces, *(parameter.grad_pieces or ())))


def test_the_same_case_gives_the_same_bits_on_a_new_pool():
    once = CaseRunner().observe("torch-ddp", case(), observe_all=True)
    again = CaseRunner().observe("torch-ddp", Case.from_json(case().to_json()), observe_all=True)
    fresh = Pool()
    try:
        anew = CaseRunner(fresh).observe("torch-ddp", case(), observe_all=True)
    finally:
        fresh.close()
    for other in (again, anew):
        pairs = list(zip(numbers(once), numbers(other), strict=True))
        assert len(pairs) > 50
        assert all(torch.equal(left, right) for left, right in pairs)


def test_looking_changes_nothing():
    plain = CaseRunner().observe("torch-fsdp2", case(strategy="full_shard"))
    watched = CaseRunner().observe("torch-fsdp2", case(strategy="full_shard"), observe_all=True)
    last = [[rank.snapshots[-1]] for rank in plain], [[rank.snapshots[-1]] for rank in watched]
    for left, right in zip(*last):
        for fqn, parameter in left[0].parameters.items():
            assert [p.value.tolist() for p in parameter.pieces] == [
                p.value.tolist() for p in right[0].parameters[fqn].pieces
            ]


def test_memory_that_stays_refutes_a_case_whose_numbers_are_right():
    judged = CaseRunner().judge("fuzz_costly:NEVER_FREED", case(strategy="full_shard"))
    assert judged.outcome.verdict is Verdict.FAIL
    assert judged.finding is not None
    assert judged.finding.kind is FailureKind.KEPT
    assert judged.finding.operation == 0
    assert CaseRunner().judge("fsdp_ref-composable", case(strategy="full_shard")).outcome.verdict is Verdict.PASS


def test_a_model_that_stays_in_memory_refutes_a_case_that_is_right_but_for_that():
    runner = CaseRunner()
    judged = runner.judge("fuzz_faults:KEEPS_MODELS", case(strategy="full_shard"))
    assert judged.outcome.verdict is Verdict.FAIL
    assert judged.finding is not None
    assert (judged.finding.kind, judged.finding.sort, judged.finding.ranks) == (FailureKind.LEAKED, "model", (0,))
    # Nothing of it is said of another implementation in the same processes, nor of a run that is looked at again.
    for mode in (RunMode(), RunMode(kept=True), RunMode(kept=True)):
        assert runner.judge("toy:UNBROKEN", case(strategy="full_shard"), mode=mode).outcome.verdict is Verdict.PASS


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_right_case_passes_and_says_how_much_it_compared(lockstep):
    judgement = CaseRunner().judge("torch-ddp", case(), Comparison(lockstep=lockstep))
    assert judgement.outcome.verdict is Verdict.PASS
    assert judgement.outcome.comparisons > 20
    assert judgement.finding is None


def test_an_adapter_that_refuses_is_no_divergence():
    judgement = CaseRunner().judge("torch-ddp", case(strategy="full_shard"))
    assert judgement.outcome.verdict is Verdict.UNKNOWN
    assert "expected strategy 'no_shard'" in judgement.outcome.error


def test_a_kept_run_is_taken_again_for_the_same_adapter_and_the_same_arguments_only(monkeypatch):
    runner, names = CaseRunner(), []
    execute = runner._execute

    def counted(spec, job, arguments, name):
        names.append(name)
        return execute(spec, job, arguments, name)

    monkeypatch.setattr(runner, "_execute", counted)
    adapters = [registry.load("single-process") for _ in range(2)]

    def runs(adapter, late):
        del names[:]
        mode = RunMode(rank_jobs.run_luckily, (late, True), kept=True)
        assert runner.judge(adapter, case(), mode=mode).outcome.verdict is Verdict.PASS
        return sum(not name.startswith("oracle") for name in names)

    assert [runs(adapters[0], True), runs(adapters[0], True)] == [1, 0]
    assert [runs(adapters[0], False), runs(adapters[1], True)] == [1, 1]


def test_a_model_that_does_not_exist_is_our_mistake():
    judgement = CaseRunner().judge("torch-ddp", case(model="no_such_model"))
    assert judgement.outcome.verdict is Verdict.UNKNOWN
    assert "no_such_model" in judgement.outcome.error


def test_a_backend_that_does_not_exist_is_refused_at_once():
    wrong = Case(ModelSpec("mlp"), WorldSpec(2, "carrier_pigeon"), PROGRAM, strategy="no_shard")
    with pytest.raises(InvalidArgument, match="carrier_pigeon"):
        CaseRunner().judge("torch-ddp", wrong)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("faults_process:HANGS", "hung", "rank 1"),
        ("faults_process:DIES", "died", "rank 1 died by SIGKILL"),
        ("faults_process:LEAVES", "died", "rank 1 died with exit code 7"),
    ],
)
def test_ranks_that_do_not_return_are_findings_and_the_next_case_passes(name, kind, words):
    judgement = CaseRunner(timeout=5.0).judge(name, case(strategy="full_shard"))
    assert judgement.outcome.verdict is Verdict.FAIL
    assert judgement.finding is not None
    assert judgement.finding.kind == kind
    assert words in judgement.finding.explanation
    # From the same pool, with the time that a healthy case may need on a busy machine.
    assert CaseRunner().judge("torch-ddp", case()).outcome.verdict is Verdict.PASS


def test_an_exception_of_the_harness_itself_is_unknown(monkeypatch):
    def broken(program, operation):
        raise ZeroDivisionError("in the harness")

    program = RankProgram(case(), object(), 0)
    monkeypatch.setattr(RankProgram, "_run", lambda self, observe_all: broken(self, None))
    observation = program.run()
    assert observation.error is not None
    assert observation.error.not_implementation_fault  # nothing of the implementation had run
    assert observation.error.type_name == "ZeroDivisionError"


def scripted(monkeypatch, *findings):
    """A runner whose attempts give these findings, one after the other."""
    left = list(findings)

    def attempt(self, asked, observe_all):
        found = left.pop(0)
        return Judgement(Verdict.FAIL if found else Verdict.PASS, found, tally=Compared(comparisons=3)), ()

    monkeypatch.setattr(CaseRunner, "_attempt", attempt)
    return CaseRunner()


def finding(kind, explanation="told"):
    return Finding(FailureKind(kind), "the run", 0, "", (1,), explanation, case())


def test_a_divergence_that_hides_from_observation_is_told_as_such(monkeypatch):
    judgement = scripted(monkeypatch, finding("diverged"), None).judge("torch-ddp", case())
    assert judgement.outcome.verdict is Verdict.FAIL
    assert judgement.finding is not None
    assert "does not show if every operation is observed" in judgement.finding.explanation
