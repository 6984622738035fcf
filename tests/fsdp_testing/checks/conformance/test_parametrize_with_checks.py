"""Conformance under pytest: one test per check, with the outcomes that pytest users expect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENTRY = {"reason": "known", "kind": "diverged", "quantity": "gradient", "operation": "forward_backward"}
EXPECTED = {"none": {}, "entry": ENTRY, "reason": "known", "cause": {**ENTRY, "cause": "half of * is lost"}}
"""What stands in a list of expected failures; a reason alone says no way at all, and matches nothing."""

MODULE = """
    from fsdp_testing import parametrize_with_checks

    MEAN = "training.gradients_are_means"
    FAULT = "faults_gradients:SumForMean"

    @parametrize_with_checks("toy:UNBROKEN", FAULT, checks=(MEAN, "offload.trained"))
    def test_none(check):
        check()

    @parametrize_with_checks("toy:UNBROKEN", FAULT, checks=(MEAN,), expected_failures={{MEAN: {entry}}})
    def test_entry(check):
        check()

    @parametrize_with_checks(FAULT, checks=(MEAN,), expected_failures={{MEAN: {reason!r}}})
    def test_reason(check):
        check()

    @parametrize_with_checks(FAULT, checks=(MEAN,), expected_failures={{MEAN: {cause}}})
    def test_cause(check):
        check()
"""


# Judges without ranks: by the environment, and only where two go on at a time.
STAND_IN = """
    import os, threading
    from fsdp_testing.plugin import conformance_checks
    from fsdp_testing.cases.records import CheckResult, Verdict

    meet = threading.Barrier(2)

    def run_check(name, check, **_):
        if check.endswith("norm_1"):
            raise OSError("of this test alone")
        if "X" not in os.environ and not check.endswith("norm_2"):
            meet.wait(60)
        fits = os.environ.get("X", check) == check
        return CheckResult(name, check, "meaning", (), Verdict.PASS if fits else Verdict.FAIL)

    conformance_checks.run_check = run_check
"""
STOOD_IN = """
    import fsdp_testing, pytest
    some = fsdp_testing.parametrize_with_checks("torch-ddp", checks=("clipping.norm_?", "clipping.norm_inf"))

    @some
    def test_meets(check):
        if check.name.endswith("norm_2"):
            pytest.skip("does not call it")
        check()

    @some
    def test_sets_a_variable(check, monkeypatch):
        monkeypatch.setenv("X", check.name)
        check()
        check()
"""


@pytest.fixture
def session(pytester, zygote):
    """Run pytest in the folder of `pytester`."""

    def run(*words):
        done = zygote.run(pytester.path, ("-m", "pytest", "-p", "no:cacheprovider", *words), os.environ)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    return run


def test_those_of_one_function_go_on_side_by_side(pytester, session, monkeypatch):
    """Each of `test_meets` waits for another one; what was judged with another environment is judged again."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # its workers keep the processors busy already
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile(STOOD_IN)
    result = session("--check-jobs", "2", "-v")
    result.assert_outcomes(passed=5, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*test_meets[[]torch-ddp-clipping.norm_1[]] FAILED*", "*OSError: of this test alone*"])
    result = session("--check-jobs", "1000")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --check-jobs: expected at most * here (*), got 1000. Give fewer."])


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_each_check_is_one_test_and_a_failure_of_the_expected_kind_is_a_strict_xfail(pytester, session, jobs):
    broken = Path(__file__).parents[3] / "quality" / "broken"
    pytester.makepyfile(MODULE.format(**EXPECTED))
    pytester.makeini(f"[pytest]\npythonpath = {broken}\n")
    result = session("-rs", "-v", "--check-jobs", jobs)
    # The unbroken one passes although a failure was expected: stale, and reported as a failure.
    result.assert_outcomes(passed=1, failed=4, skipped=2, xfailed=1)
    fault = "[[]faults_gradients:SumForMean-training.gradients_are_means[]]"
    result.stdout.fnmatch_lines_random(
        [
            "*test_none[[]toy:UNBROKEN-training.gradients_are_means[]] PASSED*",
            f"*test_none{fault} FAILED*",
            "*CheckFailed: faults_gradients:SumForMean training.gradients_are_means: after operation 0 *",
            "*run it again: fsdp-verify run faults_gradients:SumForMean --check training.gradients_are_means --world-size 2",
            "*case, for `fsdp-verify replay FILE --implementation NAME`:*",
            "*not claimed: * does not claim cpu_offload*",
            f"*test_entry{fault} XFAIL*",
            "*test_entry[[]toy:UNBROKEN-training.gradients_are_means[]] FAILED*",
            "*XPASS(strict)*known*",
            f"*test_reason{fault} FAILED*",
            f"*test_cause{fault} FAILED*",
        ]
    )
    # Neither the reason alone nor another cause makes it the known failure.
    result.stdout.fnmatch_lines(
        ["*listed as known *, without saying how it fails*", "*the list has *; this failure is *"]
    )


def test_a_check_is_asked_where_the_decorator_says(monkeypatch):
    from fsdp_testing import parametrize_with_checks
    from fsdp_testing.cases.records import CheckResult, Verdict
    from fsdp_testing.plugin import conformance_checks

    asked = []

    def run_check(name, check, **where):
        asked.append((name, check, where))
        return CheckResult(name, check, "", (), Verdict.PASS)

    monkeypatch.setattr(conformance_checks, "run_check", run_check)
    mark = parametrize_with_checks(
        "torch-fsdp2", world_sizes=(4,), tensor_parallel=2, checks=("training.gradients_are_means",)
    )
    (parameter,) = mark.args[1]
    parameter.values[0]()
    where = {"world_sizes": (4,), "tensor_parallel": 2, "backend": "gloo", "expected": None}
    assert asked == [("torch-fsdp2", "training.gradients_are_means", where)]
