"""Are the suites sensitive? Each planted fault is caught by the check named for it, which passes without the fault."""

from __future__ import annotations

import faults_gradients  # noqa: F401 - registers its faults
import faults_models  # noqa: F401 - registers its faults
import faults_state  # noqa: F401 - registers its faults
import pytest
from fault import FAULTS

from fsdp_testing.conformance import run_check, run_conformance
from fsdp_testing.errors import InvalidImplementation
from fsdp_testing.records import Verdict

UNBROKEN = "toy:UNBROKEN"

#: What wrapping itself changes is refused by the examination that comes before every check, with these words.
EXAMINED = {
    "faults_state:WrapRounds": r"wrap changed the values of 'layers\.0\.weight'",
    "faults_state:WrapTrainsEverything": r"wrap changed requires_grad of 'layers\.0\.bias'",
}


@pytest.mark.parametrize(("name", "told"), EXAMINED.items())
def test_what_wrapping_changes_is_refused_before_any_check(name, told):
    with pytest.raises(InvalidImplementation, match=told):
        run_check(name, FAULTS[name].caught_by)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in EXAMINED])
def test_a_planted_fault_is_caught_by_its_check(name):
    fault = FAULTS[name]
    result = run_check(name, fault.caught_by)
    assert result.verdict is Verdict.FAIL, f"{fault.story} {result.explanation}"
    assert result.findings
    for finding in result.findings:
        assert finding.explanation
        assert finding.case.program or finding.operation <= 0
        if finding.kind == "diverged" and finding.max_error is not None:
            assert finding.bound is not None
            assert finding.max_error > finding.bound


@pytest.mark.parametrize("check", sorted({fault.caught_by for fault in FAULTS.values()}))
def test_the_same_check_passes_without_the_fault(check):
    result = run_check(UNBROKEN, check)
    assert result.verdict is Verdict.PASS, result.explanation
    assert all(case.comparisons for case in result.cases)


def test_at_least_twenty_faults_in_many_suites_are_planted():
    assert len(FAULTS) >= 20
    assert len({fault.caught_by.partition(".")[0] for fault in FAULTS.values()}) >= 10


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
