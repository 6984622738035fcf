"""The suites are sensitive: each planted fault is caught by the check named for it, in a case that passes without the fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import faults_missed
import faults_user_state
import proving
import pytest
from every_fault import FAULTS
from fault import Fault
from proving import BUGS, UNBROKEN, judged, passes_without, proofs

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import CheckResult, Verdict
from fsdp_testing.checks.conformance import run_check, run_conformance
from fsdp_testing.checks.findings.known import shipped, tables_of
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import Place
from fsdp_testing.errors import InvalidArgument


@pytest.mark.parametrize(("name", "check"), [(name, check) for name, f in FAULTS.items() for check in f.checks])
def test_a_planted_fault_is_caught_by_its_check(name, check):
    fault = FAULTS[name]
    result = judged(name, check, fault.sizes(check), stop_at_first=True)
    assert result.verdict is Verdict.FAIL, f"{fault.story} {result.explanation}"
    assert result.findings
    for finding in result.findings:
        assert finding.explanation
        assert finding.case.program or finding.operation <= 0
        if finding.kind == "diverged" and finding.max_error is not None:
            assert finding.bound is not None
            assert finding.max_error > finding.bound
    assert passes_without(fault, check, result.findings[0].case), "it fails without the fault too, and proves nothing"


def together(faults):
    """Return what has to pass in parts of at most thirty checks, which one run of an implementation judges."""
    for (name, sizes), of in groupby(sorted(proofs(faults), key=itemgetter(0, 2)), itemgetter(0, 2)):
        checks = [check for _, check, _ in of]
        for number, begin in enumerate(range(0, len(checks), 30), 1):
            part = checks[begin : begin + 30]
            yield pytest.param(name, sizes, part, id=f"{name}-{'x'.join(map(str, sizes))}-{number}")


@pytest.mark.slow  # all cases of the checks; each push asks those that fail with a fault (above)
@pytest.mark.parametrize(("name", "sizes", "checks"), list(together(FAULTS.values())))
def test_the_same_checks_pass_without_the_faults(name, sizes, checks):
    known = {check: entry for check, entry in tables_of(shipped()).get(name, {}).items() if check in checks}
    results = run_conformance(name, checks=checks, world_sizes=sizes, expected_failures={name: known}).results
    assert {result.check for result in results} == set(checks)
    # A check on the list fails in other cases than those that prove its fault.
    sound = (Verdict.PASS, Verdict.EXPECTED_FAILURE)
    wrong = [f"{result.check}: {result.explanation}" for result in results if result.verdict not in sound]
    assert not wrong, "\n".join(wrong)
    assert all(case.comparisons for result in results if result.verdict is Verdict.PASS for case in result.cases)


NO_FAULT: dict[str, str] = {}
"""Checks that no planted fault is known to break, with the reason why none is."""


def test_every_check_has_a_fault_of_its_own():
    caught = {check for fault in FAULTS.values() for check in fault.checks}
    assert caught <= set(CHECKS)
    assert set(CHECKS) - caught == set(NO_FAULT)
    assert all(NO_FAULT.values())


def test_faults_are_planted_for_every_suite():
    suites = Counter(check.partition(".")[0] for fault in FAULTS.values() for check in fault.checks)
    assert len(FAULTS) >= 225
    for suite in {name.partition(".")[0] for name in CHECKS}:
        assert suites[suite] >= 3, f"{suite} has {suites[suite]} faults"


def test_a_fault_that_is_none_escapes_however_many_are_judged_at_a_time(monkeypatch):
    """Proving itself can fail: what plants nothing is missed, and what fails anyhow proves nothing."""
    sound = "fsdp_ref-wrapper"
    nothing = Fault(registry.adapter_of(sound), ("clipping.norm_2",), "", sound)
    anyhow = replace(FAULTS[BUGS["B147"]], checks=("clipping.norm_2",), unbroken=BUGS["B147"])
    caught = replace(FAULTS[BUGS["B036"]], checks=FAULTS[BUGS["B036"]].checks[:1])
    names = {sound: nothing, BUGS["B147"]: anyhow, BUGS["B036"]: caught}
    monkeypatch.setattr(proving, "FAULTS", names)
    for jobs in (1, 3):
        fates = [(proof.missed, proof.false_alarms, proof.caught) for proof in proving.prove(names, jobs=jobs)]
        assert fates == [(("clipping.norm_2",), (), False), ((), ("clipping.norm_2",), False), ((), (), True)]


def test_a_case_that_fails_without_the_fault_too_proves_nothing():
    name, check = BUGS["B147"], "clipping.norm_2"
    case = judged(name, check, (2,), stop_at_first=True).findings[0].case
    assert passes_without(FAULTS[name], check, case)
    assert not passes_without(replace(FAULTS[name], unbroken=name), check, case)


@pytest.mark.parametrize("capability", ["clip_grad_norm", "full_shard"])
def test_a_case_that_is_not_claimed_without_the_fault_proves_nothing(monkeypatch, capability):
    """A capability that the check needs, and one that only the case does; a run would ask nothing of such a sound toy."""
    fault, check = FAULTS[BUGS["B147"]], CHECKS["clipping.norm_2"]
    case = check.build(Place(2, "full_shard", "gloo"))[0]
    assert passes_without(fault, check.name, case)
    load = registry.load
    monkeypatch.setattr(
        registry, "load", lambda name: replace(load(name), capabilities=load(name).capabilities - {capability})
    )
    assert not passes_without(fault, check.name, case)


def test_whoever_recomputes_by_forward_recomputes():
    result = run_check(faults_user_state.BY_FORWARD.reference, "activation_checkpointing.recomputed")
    assert result.verdict is Verdict.PASS, result.explanation


def test_a_fault_is_named_by_its_number_or_its_name():
    assert proving.chosen(["B147", "faults_gradients:SumForMean"]) == [BUGS["B147"], "faults_gradients:SumForMean"]
    assert proving.chosen([]) == list(BUGS.values())
    with pytest.raises(InvalidArgument, match="B9999"):
        proving.chosen(["B9999", "B024"])


def test_a_wrong_mean_at_an_odd_size_shows_in_a_run_without_world_sizes():
    name, check = faults_missed.AT_ODD_SIZES, "training.gradients_are_means"
    assert run_check(name, check, stop_at_first=True).verdict is Verdict.PASS
    usual = run_check(name, check, world_sizes=None, stop_at_first=True)
    assert usual.verdict is Verdict.FAIL
    assert [finding.case.world.size for finding in usual.findings] == [3]


def as_known_of(implementation: str, check: str, name: str) -> CheckResult:
    """The result of a planted fault in which the known failures of an implementation are expected."""
    known = {name: {check: tables_of(shipped())[implementation][check]}}
    sizes = FAULTS[name].sizes(check) if name in FAULTS else (2,)
    (result,) = run_conformance(name, checks=(check,), world_sizes=sizes, expected_failures=known, explain=0).results
    return result


@pytest.mark.parametrize(
    ("fault", "new"),
    [
        ("PassesOverUnknown", "state with an unknown parameter"),
        ("CutsToShape", "state with a parameter of another shape"),
        ("loads_what_fits", "state with an unknown parameter"),
        ("RefusesEverything", "ValueError"),
    ],
)
def test_that_a_state_may_lack_a_parameter_excuses_no_other_one(fault: str, new: str):
    result = as_known_of("torch-fsdp2", "full_state_dict.strict", f"faults_missed:{fault}")
    assert result.verdict is Verdict.FAIL, result.remark
    assert {finding.sort or finding.quantity for finding in result.findings if finding.expected is None} == {new}


def test_that_a_copy_stays_local_does_not_excuse_the_original():
    result = as_known_of("torch-ddp", "conversion.deepcopy_in_no_sync", "faults_missed:DDP_STAYS_LOCAL")
    assert result.verdict is Verdict.FAIL, result.remark


def test_a_group_of_one_that_does_not_reduce_excuses_no_other_group():
    result = as_known_of("torch-fsdp1", "hybrid.norms", "faults_kinds:ReplicasDrift")
    assert result.verdict is Verdict.FAIL, result.remark
    meshes = {
        known: {f.case.world.mesh for f in result.findings if (f.expected is not None) is known}
        for known in (False, True)
    }
    assert meshes == {False: {(2, 2)}, True: {(4, 1)}}


def test_units_gathered_one_by_one_keep_the_order():
    result = run_check("faults_trace:PER_LAYER", "trace.order")
    assert result.verdict is Verdict.PASS, result.explanation


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
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
