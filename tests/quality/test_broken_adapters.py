"""Are the suites sensitive? Each planted fault is caught by the check named for it, which passes without the fault."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from every_fault import FAULTS
from faults_access import IgnoringAdapter, MoreWrappingAdapter, PrefetchAdapter, ReplacingAdapter
from faults_claims import StartingAdapter
from faults_kinds import HybridAdapter, WrappingAdapter
from faults_options import CopiesAdapter, NamingAdapter, OptionsAdapter, PartsAdapter
from toy_engine import EngineAdapter
from toy_more import MoreAdapter

from fsdp_testing.conformance import run_check, run_conformance
from fsdp_testing.records import CheckResult, Verdict
from fsdp_testing.suites import CHECKS

UNBROKEN = "toy:UNBROKEN"
MORE = "toy_more:UNBROKEN"
"""What the faults of the later suites are faults of."""


KINDS = {
    IgnoringAdapter: "faults_access:IGNORING",
    PrefetchAdapter: "faults_access:PREFETCH",
    ReplacingAdapter: "faults_access:REPLACING",
    MoreWrappingAdapter: "faults_access:MORE_WRAPPING",
    StartingAdapter: "faults_claims:STARTING",
    EngineAdapter: "toy_engine:UNBROKEN",
    OptionsAdapter: "faults_options:OPTIONS",
    CopiesAdapter: "faults_options:COPIES",
    PartsAdapter: "faults_options:PARTS",
    NamingAdapter: "faults_options:NAMING",
    MoreAdapter: MORE,
    WrappingAdapter: "faults_kinds:WRAPPING",
    HybridAdapter: "faults_kinds:HYBRID",
}


def unbroken_of(check: str) -> set[str]:
    """The adapters without a fault that the faults caught by `check` were made from."""
    faults = [fault for fault in FAULTS.values() if fault.caught_by == check]
    return {fault.unbroken or _toy_of(fault.adapter) for fault in faults}


def _toy_of(adapter: Any) -> str:
    return next((name for kind, name in KINDS.items() if isinstance(adapter, kind)), UNBROKEN)


WITHOUT = [(check, name) for check in sorted({f.caught_by for f in FAULTS.values()}) for name in unbroken_of(check)]


def judged(name: str, check: str, *, stop_at_first: bool = False) -> CheckResult:
    """The check's result on two ranks, or on four where groups of ranks are the matter."""
    sizes = (4,) if check.startswith("hybrid.") or check == "streams.hybrid" else (2,)
    return run_check(name, check, world_sizes=sizes, stop_at_first=stop_at_first)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_its_check(name):
    fault = FAULTS[name]
    result = judged(name, fault.caught_by, stop_at_first=True)
    assert result.verdict is Verdict.FAIL, f"{fault.story} {result.explanation}"
    assert result.findings
    for finding in result.findings:
        assert finding.explanation
        assert finding.case.program or finding.operation <= 0
        if finding.kind == "diverged" and finding.max_error is not None:
            assert finding.bound is not None
            assert finding.max_error > finding.bound


@pytest.mark.parametrize(("check", "name"), sorted(WITHOUT))
def test_the_same_check_passes_without_the_fault(check, name):
    result = judged(name, check)
    assert result.verdict is Verdict.PASS, result.explanation
    assert all(case.comparisons for case in result.cases)


NO_FAULT: dict[str, str] = {}
"""Checks that no planted fault is known to break, with the reason why none is."""


def test_every_check_has_a_fault_of_its_own():
    caught = {fault.caught_by for fault in FAULTS.values()}
    assert caught <= set(CHECKS)
    assert set(CHECKS) - caught == set(NO_FAULT)
    assert all(NO_FAULT.values())


def test_faults_are_planted_for_every_suite():
    suites = Counter(fault.caught_by.partition(".")[0] for fault in FAULTS.values())
    assert len(FAULTS) >= 190
    for suite in {name.partition(".")[0] for name in CHECKS}:
        assert suites[suite] >= 3, f"{suite} has {suites[suite]} faults"


def test_units_gathered_one_by_one_keep_the_order():
    result = run_check("faults_trace:PER_LAYER", "trace.order")
    assert result.verdict is Verdict.PASS, result.explanation


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_unbroken_toy_passes_everything(world_size):
    report = run_conformance(UNBROKEN, world_sizes=(world_size,))
    wrong = [(r.check, r.verdict, r.explanation) for r in report.results if not r.verdict.holds]
    assert not wrong
    assert report.count(Verdict.PASS) > 80


def test_optimizer_state_under_a_wrong_name_is_caught():
    result = run_check("faults_state:STATE_OF_ONE_NAME", "training.adamw_weight_decay")
    assert result.verdict is Verdict.FAIL
    assert "optimizer state exp_avg of" in result.explanation
    assert "after operation 1 step()" in result.explanation


def test_a_rank_that_raises_alone_is_named():
    result = run_check("faults_state:RAISES_ON_ONE_RANK", "training.sgd_momentum")
    assert result.verdict is Verdict.FAIL
    assert "rank 1 raised RuntimeError: only here" in result.explanation
    assert "in operation 3 forward_backward(batch 1)" in result.explanation


def test_a_claim_without_implementation_is_told_as_such():
    result = run_check("faults_state:NOT_IMPLEMENTED", "clipping.norm_2")
    assert result.verdict is Verdict.FAIL
    assert "raised NotImplementedError: clipping is not there yet" in result.explanation
    assert "claims clip_grad_norm" in result.explanation
