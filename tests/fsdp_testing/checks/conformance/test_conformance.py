"""run_conformance: one result per implementation and check, expectations applied, bad input refused at once."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from fsdp_testing import run_conformance
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Finding,
    ForwardBackward,
    Judgement,
    ModelSpec,
    RunReport,
    Tally,
    Verdict,
    WorldSpec,
)
from fsdp_testing.checks.conformance import run_case, run_check, select_checks, shared_runner
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import HYBRID
from fsdp_testing.checks.suites.run import Where
from fsdp_testing.errors import BackendUnavailable, InvalidArgument, InvalidImplementation
from fsdp_testing.explain import root_causes
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.oracle.rank_jobs import expect_free
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.report.summary import replay_line


class Scripted(CaseRunner):
    """Judges by a script instead of ranks: the verdict of a case is that of its model's name."""

    def __init__(self, verdicts):
        super().__init__()
        self.verdicts = verdicts
        self.judged = []

    def on_ranks(self, function, *args, **world):
        return CaseRunner().on_ranks(function, *args, **world)  # adapters are examined on real ranks

    def impatient(self, timeout):
        return self

    def judge(self, name, case, comparison=None, **_how):
        self.judged.append((name, case))
        verdict = self.verdicts.get(case.model.name, Verdict.PASS)
        if isinstance(verdict, Exception):
            raise verdict
        finding = Finding("diverged", "w", 0, "step()", (0,), f"{case.model.name} is off", case, 1.0, 0.5)
        judgement = Judgement(verdict, finding if verdict is Verdict.FAIL else None, tally=Tally(1))
        return JudgedCase(case, judgement)


def run(verdicts, *checks, **options):
    runner = Scripted(verdicts)
    return run_conformance("torch-ddp", checks=checks, runner=runner, **{"explain": 0.0, **options}), runner


def test_a_failure_that_cannot_be_explained_keeps_its_verdict_and_says_so(monkeypatch):
    monkeypatch.setattr(root_causes, "Inquiry", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="torch-ddp: failures are not explained: AttributeError"):
        report, _ = run({"mlp": Verdict.FAIL}, "training.sgd_momentum", explain=60.0)
    (result,) = report.results
    assert result.verdict is Verdict.FAIL
    assert all(finding.shortest is None for finding in result.findings)


def test_a_real_run_of_two_implementations():
    report = run_conformance(
        "torch-ddp", "torch-fsdp2", checks=("training.sgd_momentum", "mixed_precision.param_float16")
    )
    assert [(r.implementation, r.check, r.verdict) for r in report.results] == [
        ("torch-ddp", "training.sgd_momentum", Verdict.PASS),
        ("torch-ddp", "mixed_precision.param_float16", Verdict.NOT_CLAIMED),
        ("torch-fsdp2", "training.sgd_momentum", Verdict.PASS),
        ("torch-fsdp2", "mixed_precision.param_float16", Verdict.PASS),
    ]
    assert report.exit_code == 0
    assert "does not claim mixed_precision" in report.results[1].explanation
    assert report.environment["torch"]
    assert RunReport.from_json(report.to_json()) == report


def test_one_failing_case_fails_the_check_and_is_told():
    report, runner = run({"deep_nest": Verdict.FAIL}, "training.adamw_weight_decay")
    (result,) = report.results
    assert result.verdict is Verdict.FAIL
    assert result.explanation == "deep_nest is off"
    assert len(result.findings) == 1
    assert len(result.cases) == len(runner.judged) == 3
    assert report.exit_code == 1


def test_one_unknown_case_forbids_a_pass():
    report, _ = run({"deep_nest": Verdict.UNKNOWN}, "training.adamw_weight_decay")
    assert report.results[0].verdict is Verdict.UNKNOWN
    assert report.exit_code == 3


def test_a_check_that_crashes_is_unknown_with_its_traceback():
    report, _ = run({"mlp": ZeroDivisionError("inside the check")}, "training.sgd_momentum")
    assert report.results[0].verdict is Verdict.UNKNOWN
    assert "ZeroDivisionError: inside the check" in report.results[0].explanation


OFF = {"reason": "upstream issue 1", "kind": "diverged", "quantity": "w", "operation": "forward_backward"}


@pytest.mark.parametrize(
    ("entry", "verdict", "seen", "code"),
    [
        (OFF, Verdict.FAIL, Verdict.EXPECTED_FAILURE, 0),
        ([{**OFF, "kind": "raised", "quantity": "ValueError: no"}, OFF], Verdict.FAIL, Verdict.EXPECTED_FAILURE, 0),
        ({**OFF, "quantity": "gradient"}, Verdict.FAIL, Verdict.FAIL, 1),
        ({**OFF, "kind": "raised", "quantity": "ValueError: no"}, Verdict.FAIL, Verdict.FAIL, 1),
        ({**OFF, "operation": "step"}, Verdict.FAIL, Verdict.FAIL, 1),
        ("upstream issue 1", Verdict.FAIL, Verdict.FAIL, 1),
        (OFF, Verdict.PASS, Verdict.STALE, 0),
        (OFF, Verdict.UNKNOWN, Verdict.UNKNOWN, 3),
    ],
)
@pytest.mark.parametrize("per_implementation", [False, True])
def test_a_failure_is_expected_by_how_it_fails(entry, verdict, seen, code, per_implementation):
    expected = {"training.float32": entry}
    report, _ = run(
        {"mlp": verdict, "deep_nest": verdict},
        "training.float32",
        expected_failures={"torch-ddp": expected} if per_implementation else expected,
    )
    assert (report.results[0].verdict, report.exit_code) == (seen, code)
    assert "upstream issue 1" in report.results[0].expected
    assert RunReport.from_json(report.to_json()) == report


def test_cases_run_at_every_world_size_and_claimed_strategy():
    runner = Scripted({})
    run_conformance("torch-fsdp1", checks=("training.learning_rate_changes",), world_sizes=(2, 3), runner=runner)
    places = [(case.world.size, case.strategy) for _, case in runner.judged]
    strategies = ("full_shard", "shard_grad_op", "no_shard")
    assert places == [(size, strategy) for size in (2, 3) for strategy in strategies]


def test_without_world_sizes_each_check_is_asked_on_its_own():
    checks = ("training.float32", "training.gradients_are_means", "hybrid.trained")
    report = run_conformance("fsdp_ref-composable", checks=checks, world_sizes=None, explain=0)
    sizes = {result.check: result.world_sizes for result in report.results}
    assert sizes == dict(zip(checks, [(2,), (2, 3, 8), (4,)]))
    assert report.world_sizes == (2, 3, 4, 8)
    assert report.exit_code == 0


def test_worlds_beyond_four_ranks_are_left_out_where_a_backend_has_fewer_devices(monkeypatch):
    check = CHECKS["training.gradients_are_means"]
    assert Where(None).sizes(check) == (2, 3, 8)
    fewer = SimpleNamespace(unavailable=lambda size: "too few devices" if size > 4 else "")
    monkeypatch.setattr("fsdp_testing.checks.suites.run.backend_named", lambda name: fewer)
    assert Where(None).sizes(check) == (2, 3)
    assert Where((8,)).sizes(check) == (8,)


def test_what_reduces_divides_pads_or_moves_is_asked_at_an_odd_size_too():
    suites = {name.partition(".")[0] for name, check in CHECKS.items() if 3 in check.sizes}
    assert suites >= {"training", "accumulation", "mixed_precision", "clipping", "unused", "sizes", "full_state_dict",
                      "sharded_state_dict", "local_state_dict", "optim_state", "options", "comm_hook"}  # fmt: skip
    assert all(3 in check.sizes for name, check in CHECKS.items() if name.startswith("sizes.") and "uneven" in name)


def test_hybrid_checks_are_asked_on_two_by_two():
    hybrid = [check for check in CHECKS.values() if check.strategies == HYBRID]
    assert hybrid
    assert all((4 in check.sizes and (2, 2) in check.meshes[4]) or check.name in DEGENERATE for check in hybrid)


DEGENERATE = {"hybrid.degenerate_groups"}
"""Groups of one rank are its matter."""


def test_every_case_of_a_run_over_two_axes_has_the_second_one():
    class Unexamined(Scripted):
        def on_ranks(self, function, *args, size, **how):
            return [[]] * size

    runner, names = Unexamined({}), ("torch-fsdp2", "fsdp_ref-wrapper", "torch-fsdp1")
    checks = ("training.learning_rate_changes", "summon.reading", "hybrid.trained")
    report = run_conformance(*names, checks=checks, world_sizes=(4,), tensor_parallel=2, runner=runner)
    assert {(case.world.size, case.world.replicas, len(case.wrapping.layouts)) for _, case in runner.judged} == {
        (4, 2, 3)
    }
    said = {(r.implementation, r.check): r.explanation for r in report.results if r.verdict is Verdict.NOT_CLAIMED}
    assert said["torch-fsdp1", "training.learning_rate_changes"] == "does not claim tensor_parallel"
    assert said["fsdp_ref-wrapper", "summon.reading"] == "does not claim summon_writeback beside tensor parallelism"
    assert ("torch-fsdp2", "hybrid.trained") in said
    assert "--tensor-parallel 2" in replay_line(report.results[0], report)
    assert RunReport.from_json(report.to_json()) == report


def test_the_listener_sees_everything_in_order():
    events = []

    class Listener:
        def planned(self, total):
            events.append(total)

        def started(self, implementation, check):
            events.append((implementation, check))

        def finished(self, result):
            events.append(result.check)

    run({}, "shared.accumulated", "training.float32", listener=Listener())
    names = ["training.float32", "shared.accumulated"]
    assert events == [2, *(event for name in names for event in (("torch-ddp", name), name))]


def test_the_default_profile_leaves_extended_checks_out():
    names = {check.name for check in select_checks(())}
    extended = {check.name for check in select_checks((), extended=True)}
    assert extended == set(CHECKS)
    assert extended - names == {name for name, check in CHECKS.items() if check.profile == "extended"}
    assert [check.name for check in select_checks(("hybrid.trained",))] == ["hybrid.trained"]


def test_a_size_at_which_a_check_has_no_case_is_said():
    asked = {"checks": ("hybrid.trained",), "world_sizes": (3,)}
    expected = {"hybrid.trained": [{"reason": "why", "kind": "diverged", "quantity": "output", "operation": "forward"}]}
    for listed in (None, expected):
        (result,) = run_conformance("torch-fsdp2", **asked, runner=Scripted({}), expected_failures=listed).results
        assert result.verdict is Verdict.NOT_CLAIMED, "no claim was dropped"
        assert result.explanation == "has no case for world size 3; it needs 4, 6, 8"


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        ((), {}, InvalidArgument, "expected at least one name, got none"),
        (("torch-ddp", "torch-ddp"), {}, InvalidArgument, r"got \['torch-ddp'\] more than once"),
        (("torch-dpp",), {}, InvalidArgument, "Did you mean"),
        (("no.such.module:thing",), {}, InvalidImplementation, "importable"),
        (
            ("torch-ddp",),
            {"checks": ("training.sgd",)},
            InvalidArgument,
            r"got \['training.sgd'\]. Did you mean training.sgd_momentum",
        ),
        (("torch-ddp",), {"checks": ("trainin",)}, InvalidArgument, r"got \['trainin'\]. Did you mean training,"),
        (("torch-ddp",), {"world_sizes": (0,)}, InvalidArgument, "sizes of at least 1"),
        (("torch-ddp",), {"world_sizes": ()}, InvalidArgument, "one or more sizes"),
        (("torch-fsdp2",), {"world_sizes": (4, 3), "tensor_parallel": 2}, InvalidArgument, r"got 2 for \[3\]"),
        (("torch-fsdp2",), {"tensor_parallel": 0}, InvalidArgument, r"divides every world size, got 0"),
        (("torch-ddp",), {"backend": "smoke"}, InvalidArgument, "smoke"),
        (("torch-ddp",), {"backend": "fake"}, InvalidArgument, "compute real values"),
        (("torch-ddp",), {"expected_failures": {"nonsense": "why"}}, InvalidArgument, "'nonsense' is not a check"),
        (("torch-ddp",), {"expected_failures": {"training.float32": " "}}, InvalidArgument, "has no reason"),
        (
            ("torch-ddp",),
            {"expected_failures": {"training.float32": {"reason": "why", "kind": "diverged", "quantity": "output"}}},
            InvalidArgument,
            "'training.float32' .torch-ddp.: lacks operation",
        ),
        (
            ("torch-ddp",),
            {"expected_failures": {"training.flaot32": OFF}},
            InvalidArgument,
            "'training.flaot32' is neither a check nor one of the implementations",
        ),
        (
            ("torch-ddp",),
            {"expected_failures": {"torch-fsdp2": {"training.float32": "why"}}},
            InvalidArgument,
            "'torch-fsdp2' is neither a check nor one of the implementations",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_runs(names, options, error, message):
    runner = Scripted({})
    with pytest.raises(error, match=message):
        run_conformance(*names, runner=runner, **options)
    assert not runner.judged


def test_a_backend_that_cannot_run_gives_its_one_reason():
    import torch

    if torch.cuda.is_available():
        pytest.skip("nccl can run here")
    with pytest.raises(BackendUnavailable, match="nccl"):
        run_conformance("torch-ddp", backend="nccl", runner=Scripted({}))


def test_a_finding_is_run_again_from_its_document():
    case = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)),), strategy="no_shard")
    again = Case.from_json(json.loads(case.to_json()))
    judgement = run_case("torch-ddp", again, lockstep=True)
    assert judgement.outcome.verdict is Verdict.PASS
    assert judgement.outcome.identity == case.identity


def test_after_a_hang_the_other_cases_of_the_check_are_not_run():
    class Hanging(Scripted):
        def judge(self, name, case, comparison=None, **_how):
            super().judge(name, case)
            hung = Finding("hung", "the run", -1, "", (1,), "rank 1 hung", case)
            return JudgedCase(case, Judgement(Verdict.FAIL, hung))

    runner = Hanging({"mlp": Verdict.FAIL})
    (result,) = run_conformance("torch-ddp", checks=("training.sgd_momentum",), runner=runner).results
    assert result.verdict is Verdict.FAIL
    assert len(runner.judged) == 1, "neither does an explanation run what hangs"
    assert result.not_run == {"an earlier case of the check hung": 3}


def test_a_hang_that_is_expected_does_not_hide_how_the_other_cases_fail():
    class Hanging(Scripted):
        def judge(self, name, case, comparison=None, **how):
            judged = super().judge(name, case, comparison, **how)
            hung = Finding("hung", "the run", -1, "", (1,), "rank 1 hung", case)
            return JudgedCase(case, Judgement(Verdict.FAIL, hung)) if len(self.judged) == 1 else judged

    def result(verdicts):
        entry = {"training.sgd_momentum": {"reason": "it waits", "kind": "hung"}}
        options = {"checks": ("training.sgd_momentum",), "runner": Hanging(verdicts), "explain": 0.0}
        return run_conformance("torch-ddp", expected_failures=entry, **options).results[0]

    good, bad = result({}), result(dict.fromkeys(("mlp", "deep_mlp", "tied"), Verdict.FAIL))
    assert good.verdict is Verdict.EXPECTED_FAILURE
    assert len(good.cases) == 4
    assert (bad.verdict, good.not_run, bad.not_run) == (Verdict.FAIL, {}, {})


def test_a_check_stops_at_its_first_finding_where_that_is_asked_for():
    runner = Scripted({"mlp": Verdict.FAIL})
    result = run_check("torch-ddp", "training.sgd_momentum", runner=runner, stop_at_first=True)
    assert result.verdict is Verdict.FAIL
    assert len(result.cases) == len(runner.judged) == 1
    assert result.not_run == {"an earlier case of the check failed": 3}


def test_an_adapter_is_examined_once_and_the_oracle_asked_once_by_all_checks_of_a_runner(monkeypatch):
    runner = CaseRunner()
    jobs = Counter()
    execute = runner._execute

    def counted(spec, job, arguments, name):
        jobs[job.__name__, name if job is expect_free else ""] += 1
        return execute(spec, job, arguments, name)

    monkeypatch.setattr(runner, "_execute", counted)
    for name in ("torch-ddp", "torch-ddp", "single-process"):
        assert run_check(name, "training.sgd_momentum", runner=runner).verdict is Verdict.PASS
    assert jobs["examine_on_rank", ""] == 2
    asked = [count for (job, _), count in jobs.items() if job == "expect_free"]
    assert asked == [1] * 4
    assert jobs["run_case", ""] == 12


def test_checks_that_are_judged_one_by_one_share_the_runner_of_the_pool():
    assert shared_runner() is shared_runner()
    assert shared_runner().pool is default_pool()
