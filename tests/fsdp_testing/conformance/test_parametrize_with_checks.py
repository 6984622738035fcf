"""Conformance under pytest: one test per check, with the outcomes that pytest users expect."""

from __future__ import annotations

MODULE = """
    import fsdp_testing

    @fsdp_testing.parametrize_with_checks(
        "toy:UNBROKEN", "faults_gradients:SumForMean",
        checks=("training.gradients_are_means", "offload.trained"),
        expected_failures={expected},
    )
    def test_conformance(check):
        check()
"""


def run(pytester, expected):
    from pathlib import Path

    broken = Path(__file__).parents[2] / "quality" / "broken"
    pytester.makepyfile(MODULE.format(expected=expected))
    pytester.makeini(f"[pytest]\npythonpath = {broken}\n")
    return pytester.runpytest_subprocess("-rs", "-v")


def test_each_check_is_one_test(pytester):
    result = run(pytester, {})
    result.assert_outcomes(passed=1, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "*test_conformance[[]toy:UNBROKEN-training.gradients_are_means[]] PASSED*",
            "*test_conformance[[]faults_gradients:SumForMean-training.gradients_are_means[]] FAILED*",
            "*CheckFailed: faults_gradients:SumForMean training.gradients_are_means: after operation 0 *",
            "*case, for `fsdp-verify replay`:*",
            "*not claimed: * does not claim cpu_offload*",
        ]
    )


def test_an_expected_failure_is_a_strict_xfail(pytester):
    result = run(pytester, {"training.gradients_are_means": "known"})
    # The unbroken one passes although a failure was expected: stale, and reported as a failure.
    result.assert_outcomes(xfailed=1, failed=1, skipped=2)
    result.stdout.fnmatch_lines(["*XPASS(strict)*known*"])


def test_a_check_is_asked_where_the_decorator_says(monkeypatch):
    from fsdp_testing import parametrize_with_checks
    from fsdp_testing.pytest_plugin import conformance_checks
    from fsdp_testing.records import CheckResult, Verdict

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
    where = {"world_sizes": (4,), "tensor_parallel": 2, "backend": "gloo"}
    assert asked == [("torch-fsdp2", "training.gradients_are_means", where)]
