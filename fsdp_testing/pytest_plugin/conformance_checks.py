"""How does conformance run under pytest? `@parametrize_with_checks("name")` makes one test of every check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from fsdp_testing.conformance import load_all, run_check, select_checks
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.pytest_plugin.checks_ahead import result_of
from fsdp_testing.records import CheckResult, RunReport, Verdict
from fsdp_testing.report.summary import replay_line
from fsdp_testing.suites import CHECKS


class CheckFailed(AssertionError):
    """A check refuted a claim; the message is its explanation, and how to run its case again."""


class CheckUnknown(Exception):
    """Nothing is known of a claim, because the check crashed or its world was lost: never a pass, never a skip."""


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """One check on one implementation; call it.

    Attributes:
        implementation: Name of the implementation.
        name: Name of the check.
        world_sizes: Sizes it runs on.
        backend: Backend it runs on.
    """

    implementation: str
    name: str
    world_sizes: tuple[int, ...] = (2,)
    backend: str = "gloo"

    def __call__(self) -> CheckResult:
        """Run the check.

        Returns:
            The result, if the claim holds.

        Raises:
            CheckFailed: It does not.
            CheckUnknown: Nothing is known.
            pytest.skip.Exception: The implementation does not claim it.
        """
        result = result_of(self)
        if result.verdict is Verdict.NOT_CLAIMED:
            pytest.skip(f"not claimed: {self.implementation} {result.explanation}")
        if result.verdict is Verdict.UNKNOWN:
            raise CheckUnknown(f"{self.implementation} {self.name}: {result.explanation}")
        if result.verdict is Verdict.FAIL:
            raise CheckFailed(_explanation(result))
        return result

    def judged(self) -> CheckResult:
        """Judge it now."""
        return run_check(self.implementation, self.name, world_sizes=self.world_sizes, backend=self.backend)


def parametrize_with_checks(
    *names: str,
    world_sizes: Sequence[int] = (2,),
    backend: str = "gloo",
    checks: Sequence[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    extended: bool = False,
) -> pytest.MarkDecorator:
    """Parametrize a test function over every check; its argument is `check`, and it calls `check()`.

    Args:
        *names: Implementations, by registered name or import string.
        world_sizes: Numbers of ranks.
        backend: Backend of the worlds.
        checks: Patterns of check names or names of suites.
        expected_failures: Reason by check name; such a test is a strict xfail, so that a stale entry fails.
        extended: The extended profile too.

    Raises:
        InvalidArgument: An unknown implementation, pattern or check name.
    """
    load_all(names)
    expected = dict(expected_failures or {})
    unknown = sorted(set(expected) - set(CHECKS))
    if unknown:
        raise InvalidArgument(f"expected_failures: expected names of checks, got {unknown}. Correct the spelling.")
    parameters = [
        pytest.param(
            BoundCheck(name, check.name, tuple(world_sizes), backend),
            id=f"{name}-{check.name}",
            marks=[pytest.mark.xfail(reason=expected[check.name], raises=CheckFailed, strict=True)]
            if check.name in expected
            else [],
        )
        for name in names
        for check in select_checks(checks, extended=extended)
    ]
    return pytest.mark.parametrize("check", parameters)


def _explanation(result: CheckResult) -> str:
    lines = [f"{result.implementation} {result.check}: {result.explanation}", f"claim: {result.meaning}"]
    for finding in result.findings[:3]:
        lines.append(f"  {finding.case.strategy}, {finding.case.world.size} ranks: {finding.explanation}")
        if finding.bound_derivation:
            lines.append(f"    bound: {finding.bound_derivation}")
    if len(result.findings) > 3:
        lines.append(f"  and {len(result.findings) - 3} more cases")
    if result.findings:
        lines.append(f"run it again: {replay_line(result, RunReport((result,)))}")
        lines += ["case, for `fsdp-verify replay FILE --implementation NAME`:", result.findings[0].case.to_json()]
        lines += [result.findings[0].detail] if result.findings[0].detail else []
    return "\n".join(lines)
