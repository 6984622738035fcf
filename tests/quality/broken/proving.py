"""Proves a planted fault caught: the checks that must catch it judge it, and the implementation without it too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from every_fault import FAULTS
from fault import Fault
from faults_access import IgnoringAdapter, MoreWrappingAdapter, PrefetchAdapter, ReplacingAdapter
from faults_claims import StartingAdapter
from faults_kinds import HybridAdapter, WrappingAdapter
from faults_options import OptionsAdapter
from faults_user_code import CopiesAdapter, NamingAdapter, PartsAdapter
from toy_engine import EngineAdapter
from toy_more import MoreAdapter

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import Case, CheckResult, Verdict
from fsdp_testing.checks.conformance import run_check, shared_runner
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import needs_of
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.worlds import Shared

UNBROKEN = "toy:UNBROKEN"
KINDS = {
    IgnoringAdapter: "faults_access:IGNORING",
    PrefetchAdapter: "faults_access:PREFETCH",
    ReplacingAdapter: "faults_access:REPLACING",
    MoreWrappingAdapter: "faults_access:MORE_WRAPPING",
    StartingAdapter: "faults_claims:STARTING",
    EngineAdapter: "toy_engine:UNBROKEN",
    OptionsAdapter: "faults_options:OPTIONS",
    CopiesAdapter: "faults_user_code:COPIES",
    PartsAdapter: "faults_user_code:PARTS",
    NamingAdapter: "faults_user_code:NAMING",
    MoreAdapter: "toy_more:UNBROKEN",
    WrappingAdapter: "faults_kinds:WRAPPING",
    HybridAdapter: "faults_kinds:HYBRID",
}
"""The toy without a fault for each kind of toy."""

BUGS = dict(sorted((fault.bug, name) for name, fault in FAULTS.items() if fault.bug))
"""Names of the planted bugs of the field by their number."""

_KEPT = 1024
_PASSED: dict[tuple[str, str, str], bool] = {}


def unbroken(fault: Fault) -> str:
    """Return the implementation that the fault was planted in."""
    return fault.unbroken or next((name for kind, name in KINDS.items() if isinstance(fault.adapter, kind)), UNBROKEN)


def proofs(faults: Iterable[Fault]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return what has to pass so that a failure with the faults proves something: implementation, check, world sizes."""
    return sorted({(unbroken(fault), check, fault.sizes(check)) for fault in faults for check in fault.checks})


def judged(name: str, check: str, sizes: tuple[int, ...], **how: Any) -> CheckResult:
    """Return the check's result. The fault is known, so that no time is spent on its cause."""
    return run_check(name, check, world_sizes=sizes, **how)


def passes_without(fault: Fault, check: str, case: Case) -> bool:
    """Return whether the implementation without the fault claims one case of a check and passes it; asked once for each case."""
    sound = registry.load(unbroken(fault))
    if not CHECKS[check].needs | needs_of(case) <= sound.capabilities:
        return False
    key = sound.reference, check, case.identity
    if key not in _PASSED:
        outcome = CHECKS[check].judged(shared_runner(), sound, case).outcome
        _PASSED[key] = outcome.verdict is Verdict.PASS and outcome.comparisons > 0
    return _PASSED[key]


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one fault.

    Attributes:
        name: The fault's.
        missed: Checks that had to fail on it and did not.
        false_alarms: Checks that do not pass without it, so that their failure with it proves nothing.
        seconds: For both.
    """

    name: str
    missed: tuple[str, ...]
    false_alarms: tuple[str, ...]
    seconds: float

    @property
    def caught(self) -> bool:
        """Every check fails with the fault and passes without it."""
        return not self.missed and not self.false_alarms


def chosen(names: Iterable[str]) -> list[str]:
    """Return the names of faults that are meant by number or name; all bugs of the field where none is.

    Raises:
        InvalidArgument: what is neither; every one is listed.
    """
    wanted = list(names)
    unknown = [name for name in wanted if name not in BUGS and name not in FAULTS]
    if unknown:
        raise InvalidArgument(
            f"museum: expected numbers among {', '.join(BUGS)}, or names of planted faults such as "
            f"{next(iter(FAULTS))}, got {unknown}. Choose from `--list`."
        )
    return [BUGS.get(name, name) for name in wanted] if wanted else list(BUGS.values())


def prove(names: Iterable[str], *, runner: CaseRunner | None = None, jobs: int = 1) -> Iterator[Proof]:
    """Judge each fault in turn; the implementation without it is judged once for each check and world sizes.

    Args:
        names: Of `FAULTS`.
        runner: Where cases run; by default the process's shared one.
        jobs: Faults judged at a time, each on worlds of its own; proofs and their order are the same for any number.
    """
    runner = runner or shared_runner()
    known = Shared[CheckResult](_KEPT)
    with closing(runner.side_by_side([partial(_prove, runner, name, known) for name in names], jobs)) as proven:
        yield from proven


def _prove(runner: CaseRunner, name: str, known: Shared[CheckResult]) -> Proof:
    started, fault = time.monotonic(), FAULTS[name]
    missed, false_alarms = [], []
    for check in fault.checks:
        sizes, sound = fault.sizes(check), unbroken(fault)
        if judged(name, check, sizes, runner=runner).verdict is not Verdict.FAIL:
            missed.append(check)
        without = known.get((sound, check, sizes), partial(judged, sound, check, sizes, runner=runner))
        if without.verdict is not Verdict.PASS:
            false_alarms.append(check)
    return Proof(name, tuple(missed), tuple(false_alarms), time.monotonic() - started)
