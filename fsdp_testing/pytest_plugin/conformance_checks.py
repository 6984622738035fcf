"""How does conformance run under pytest? `@parametrize_with_checks("name")` makes one test of every check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_testing.conformance import load_all, run_check, select_checks
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.pytest_plugin.checks_ahead import result_of
from fsdp_testing.records import CheckResult, Verdict
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
        tensor_parallel: How many ranks hold one model together.
    """

    implementation: str
    name: str
    world_sizes: tuple[int, ...] = (2,)
    backend: str = "gloo"
    tensor_parallel: int = 1

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
        where: dict[str, Any] = {"world_sizes": self.world_sizes, "tensor_parallel": self.tensor_parallel}
        return run_check(self.implementation, self.name, backend=self.backend, **where)


def parametrize_with_checks(
    *names: str,
    world_sizes: Sequence[int] = (2,),
    tensor_parallel: int = 1,
    backend: str = "gloo",
    checks: Sequence[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    extended: bool = False,
) -> pytest.MarkDecorator:
    """Parametrize a test function over every check; its argument is `check`, and it calls `check()`.

    Args:
        *names: Implementations, by registered name or import string.
        world_sizes: Numbers of ranks.
        tensor_parallel: How many of them hold one model together, cut by torch's tensor parallelism; it divides every size.
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
            BoundCheck(name, check.name, tuple(world_sizes), backend, tensor_parallel),
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
        lines += ["case, for `fsdp-verify replay`:", result.findings[0].case.to_json()]
        lines += [result.findings[0].detail] if result.findings[0].detail else []
    return "\n".join(lines)
