"""Tests an implementation beyond its claims: a loud error is an honest limit, a wrong number a finding.

Every check that an implementation skips for one missing capability runs on a variant of its adapter that also claims it:
`fsdp_testing.checks.suites.beyond_claims:torch-fsdp1+several_forwards`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.operations.user_code import NotRefused
from fsdp_testing.cases.records import STRATEGIES, CheckResult, FailureKind, Finding, Verdict
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import Check
from fsdp_testing.checks.suites.run import Where, judge_check
from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.judging.case_runner import CaseRunner

_SEPARATOR = "+"
_SILENT = (FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING)


class Limit(enum.StrEnum):
    """The result for an unclaimed capability, worst first."""

    SILENT = "silent outside its claims"
    """Wrong numbers without an error."""
    HANGS = "hangs or dies"
    """A rank did not come back, or the ranks' collectives did not match."""
    REFUSES = "refuses"
    """A loud error."""
    TAKES_MORE = "takes more"
    """Right numbers, and more memory or communication than promised."""
    OPEN = "not decided"
    """The probes decide nothing: the adapter has no method for it, or the numbers are inconclusive."""
    WORKS = "works"
    """Every probe gave the right numbers."""
    NOT_ASKED = "no probe"
    """No check can run: each needs further unclaimed capabilities."""


_ORDER = list(Limit)


@dataclass(frozen=True, slots=True)
class Probed:
    """One capability that an implementation does not claim.

    Attributes:
        capability: Its tag.
        limit: The worst result of any probe.
        check: The probe that gave it, if there is one.
        text: The error, or the wrong number.
    """

    capability: str
    limit: Limit
    check: str = ""
    text: str = ""


def variant(name: str) -> Adapter:
    """Return the adapter called `implementation+capability`: it claims that capability, and is otherwise the same."""
    implementation, _, capability = name.partition(_SEPARATOR)
    adapter = registry.adapter_of(implementation)
    return replace(adapter, capabilities=adapter.capabilities | {capability})


def __getattr__(name: str) -> Adapter:
    if _SEPARATOR not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return variant(name)


def probes(adapter: Adapter, capability: str) -> tuple[Check, ...]:
    """Return the checks that `adapter` skips only for lack of `capability`; for a strategy the plain training checks."""
    claimed = adapter.capabilities | {capability}
    if capability == "tensor_parallel":  # a setting of the run, which no check needs
        return tuple(c for c in CHECKS.values() if c.name.startswith("training.gradients") and c.needs <= claimed)
    strategies = tuple(name for name, tag in STRATEGIES.items() if tag == capability)
    if strategies:
        plain = [check for check in CHECKS.values() if check.name.startswith(("training.gradients", "hybrid."))]
        return tuple(
            replace(check, strategies=tuple(name for name in strategies if name in check.strategies))
            for check in plain
            if check.needs <= claimed and set(strategies) & set(check.strategies)
        )
    return tuple(check for check in CHECKS.values() if capability in check.needs and check.needs <= claimed)


def probe(runner: CaseRunner, adapter: Adapter, capability: str) -> Probed:
    """Run the checks that `adapter` skips only for lack of `capability`, by strategy, up to the first wrong number."""
    claiming = registry.load(f"{__name__}:{adapter.reference}{_SEPARATOR}{capability}")
    worst = Probed(capability, Limit.NOT_ASKED)
    for check in probes(adapter, capability):
        # An error under one strategy must not hide a wrong number under another.
        for strategy in (name for name in check.strategies if STRATEGIES[name] in claiming.capabilities):
            where = Where((4,)) if check.meshes else Where(None)
            where = Where((4,), tensor_parallel=2) if capability == "tensor_parallel" else where
            narrowed = replace(check, strategies=(strategy,))
            result = judge_check(runner, claiming, narrowed, where, stop_at_first=True)
            outcome = _probed(capability, result)
            worst = min(worst, outcome, key=lambda probed: _ORDER.index(probed.limit))
            if outcome.limit is Limit.SILENT:
                return worst  # nothing is worse
    return worst


def _probed(capability: str, result: CheckResult) -> Probed:
    if result.verdict is Verdict.FAIL:
        first = _worst(result.findings)
        # The ledger stops ranks whose collectives differ, with an error; without it they would hang.
        parted = first.quantity.endswith(CollectiveMismatch.__name__)
        # A missing refusal is an exception too.
        silent = first.kind in _SILENT or first.quantity.endswith(NotRefused.__name__)
        limit = Limit.SILENT if silent else Limit.REFUSES
        if first.kind in (FailureKind.KEPT, FailureKind.EXCESS):
            limit = Limit.TAKES_MORE
        if parted or first.kind in (FailureKind.DIED, FailureKind.HUNG, FailureKind.UNCOORDINATED):
            limit = Limit.HANGS
        return Probed(capability, limit, result.check, first.statement or first.explanation)
    limits = {Verdict.PASS: Limit.WORKS, Verdict.NOT_CLAIMED: Limit.NOT_ASKED}
    return Probed(capability, limits.get(result.verdict, Limit.OPEN), result.check, result.explanation)


def _worst(findings: Sequence[Finding]) -> Finding:
    return next((finding for finding in findings if finding.kind in _SILENT), findings[0])
