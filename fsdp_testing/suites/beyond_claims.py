"""What does an implementation do with what it does not claim? A loud error is an honest limit, a wrong number a finding.

Every check that one missing capability keeps from an implementation is asked of a variant of its adapter that claims that
capability too: `fsdp_testing.suites.beyond_claims:torch-fsdp1+several_forwards`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.implementations import registry
from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.records import CAPABILITIES, STRATEGIES, CheckResult, FailureKind, Finding, Verdict
from fsdp_testing.suites import CHECKS
from fsdp_testing.suites.check import Check
from fsdp_testing.suites.run import Where, judge_check

_SEPARATOR = "+"
_SILENT = (FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING)


class Limit(enum.StrEnum):
    """What became of a capability that is not claimed, the worst first."""

    SILENT = "silent outside its claims"
    """Wrong numbers and no word of it."""
    HANGS = "hangs or dies"
    """A rank did not come back, or the ranks' collectives did not match."""
    REFUSES = "refuses"
    """An error says so."""
    OPEN = "not decided"
    """The probes decide nothing: the adapter has no method for it, or the numbers do not say."""
    WORKS = "works"
    """Every probe gave the right numbers."""
    NOT_ASKED = "no probe"
    """No check can be asked: each needs other capabilities that are not claimed, too."""


_ORDER = list(Limit)


@dataclass(frozen=True, slots=True)
class Probed:
    """One capability that an implementation does not claim.

    Attributes:
        capability: Its tag.
        limit: The worst that any probe showed.
        check: The probe that showed it, if there is one.
        text: What it said: the error, or the wrong number.
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
    """Return the checks that `capability` alone keeps from `adapter`; of a strategy the plain training checks."""
    claimed = adapter.capabilities | {capability}
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
    """Ask the checks that `capability` alone keeps from `adapter`, up to the first wrong number or the second error."""
    asked = registry.load(f"{__name__}:{adapter.reference}{_SEPARATOR}{capability}")
    worst, errors = Probed(capability, Limit.NOT_ASKED), 0
    for check in probes(adapter, capability):
        where = Where((4,)) if check.meshes else Where()
        found = _probed(capability, judge_check(runner, asked, check, where, stop_at_first=True))
        worst = min(worst, found, key=lambda one: _ORDER.index(one.limit))
        errors += found.limit in (Limit.REFUSES, Limit.HANGS)
        if found.limit in (Limit.SILENT, Limit.OPEN) or errors > 1:
            break  # nothing is worse; what cannot be asked once cannot be asked at all; and each error costs a world
    return worst


def probe_all(runner: CaseRunner, adapter: Adapter) -> Iterator[Probed]:
    """Probe every capability that `adapter` does not claim, in the order of the registry."""
    for capability in CAPABILITIES:
        if capability not in adapter.capabilities:
            yield probe(runner, adapter, capability)


def _probed(capability: str, result: CheckResult) -> Probed:
    if result.verdict is Verdict.FAIL:
        first = _worst(result.findings)
        limit = Limit.SILENT if first.kind in _SILENT else Limit.REFUSES
        if first.kind in (FailureKind.DIED, FailureKind.HUNG, FailureKind.UNCOORDINATED):
            limit = Limit.HANGS
        return Probed(capability, limit, result.check, first.statement or first.explanation)
    known = {Verdict.PASS: Limit.WORKS, Verdict.NOT_CLAIMED: Limit.NOT_ASKED}
    return Probed(capability, known.get(result.verdict, Limit.OPEN), result.check, result.explanation)


def _worst(findings: Sequence[Finding]) -> Finding:
    return next((one for one in findings if one.kind in _SILENT), findings[0])
