"""Conformance under pytest: `@parametrize_with_checks("name")` makes one test of every check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fsdp_testing.cases.records import CheckResult, RunReport, Verdict
from fsdp_testing.checks.conformance import load_all, run_check, select_checks
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.judging.expected import Expectation, expectations
from fsdp_testing.judging.signature import entry_literal
from fsdp_testing.plugin.checks_ahead import result_of
from fsdp_testing.report.summary import replay_line


class CheckFailed(AssertionError):
    """A check refuted a claim; the message explains it and says how to run its case again."""


class CheckFailedAsExpected(CheckFailed):
    """A check refuted a claim, in each case in a way that `expected_failures` names."""


class CheckUnknown(Exception):
    """No verdict on a claim, because the check crashed or its world was lost: never a pass, never a skip."""


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """One check on one implementation; call it.

    Attributes:
        implementation: Name of the implementation.
        name: Name of the check.
        world_sizes: Sizes it runs on.
        backend: Backend it runs on.
        tensor_parallel: How many ranks share one model.
        expected: Known ways to fail.
    """

    implementation: str
    name: str
    world_sizes: tuple[int, ...] = (2,)
    backend: str = "gloo"
    tensor_parallel: int = 1
    expected: Expectation | None = None

    def __call__(self) -> CheckResult:
        """Run the check.

        Returns:
            The result, if the claim holds.

        Raises:
            CheckFailed: The claim does not hold.
            CheckFailedAsExpected: The claim fails in a known way.
            CheckUnknown: There is no verdict.
            pytest.skip.Exception: The implementation does not claim it.
        """
        result = result_of(self)
        if result.verdict is Verdict.NOT_CLAIMED:
            pytest.skip(f"not claimed: {self.implementation} {result.explanation}")
        if result.verdict is Verdict.UNKNOWN:
            raise CheckUnknown(f"{self.implementation} {self.name}: {result.explanation}")
        if result.verdict is Verdict.EXPECTED_FAILURE:
            raise CheckFailedAsExpected(_explanation(result))
        if result.verdict is Verdict.FAIL:
            raise CheckFailed(_explanation(result))
        return result

    def judged(self) -> CheckResult:
        """Judge the check now."""
        where: dict[str, Any] = {"world_sizes": self.world_sizes, "tensor_parallel": self.tensor_parallel}
        result = run_check(self.implementation, self.name, backend=self.backend, expected=self.expected, **where)
        # pytest itself reports an unexpected pass, and an unclaimed check is no failure.
        idle = result.verdict is Verdict.STALE
        return replace(result, verdict=Verdict.PASS if result.cases else Verdict.NOT_CLAIMED) if idle else result


def parametrize_with_checks(
    *names: str,
    world_sizes: Sequence[int] = (2,),
    tensor_parallel: int = 1,
    backend: str = "gloo",
    checks: Sequence[str] = (),
    expected_failures: Mapping[str, Any] | None = None,
    extended: bool = False,
) -> pytest.MarkDecorator:
    """Parametrize a test function over every check; its argument is `check`, and it calls `check()`.

    Args:
        *names: Implementations, by registered name or import string.
        world_sizes: Numbers of ranks.
        tensor_parallel: How many of them share one model by torch's tensor parallelism; it divides every size.
        backend: Backend of the worlds.
        checks: Patterns of check names or names of suites.
        expected_failures: As for `run_conformance`: how each check fails, by name. Such a test is a strict xfail, so a stale
            entry fails; any other failure fails the test.
        extended: Run the extended profile too.

    Raises:
        InvalidArgument: An unknown implementation, pattern or check name, or an entry that does not say how it fails.
    """
    load_all(names)
    expected = expectations(expected_failures, names, CHECKS)
    parameters = [
        pytest.param(
            BoundCheck(name, check.name, tuple(world_sizes), backend, tensor_parallel, entry),
            id=f"{name}-{check.name}",
            marks=[pytest.mark.xfail(reason=entry.reason, raises=CheckFailedAsExpected, strict=True)] if entry else [],
        )
        for name in names
        for check in select_checks(checks, extended=extended)
        for entry in [expected[name].get(check.name)]
    ]
    return pytest.mark.parametrize("check", parameters)


def _explanation(result: CheckResult) -> str:
    lines = [f"{result.implementation} {result.check}: {result.explanation}", f"claim: {result.meaning}"]
    lines += [result.remark] if result.remark else []
    for finding in result.findings[:3]:
        lines.append(f"  {finding.case.strategy}, {finding.case.world.size} ranks: {finding.explanation}")
        if finding.bound_derivation:
            lines.append(f"    bound: {finding.bound_derivation}")
    if len(result.findings) > 3:
        lines.append(f"  and {len(result.findings) - 3} more cases")
    if result.findings:
        if result.verdict is Verdict.FAIL and not result.remark:
            lines.append(f"if it is known, for expected_failures: {entry_literal(result.check, result.findings)}")
        whole = RunReport((result,), tensor_parallel=result.findings[0].case.world.tensor_parallel)
        lines.append(f"run it again: {replay_line(result, whole)}")
        lines += ["case, for `fsdp-verify replay FILE --implementation NAME`:", result.findings[0].case.to_json()]
        lines += [result.findings[0].detail] if result.findings[0].detail else []
    return "\n".join(lines)
