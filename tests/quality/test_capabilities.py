"""Every capability is judged, by a check that a planted fault proves, and by cases that operations or options make."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from every_fault import FAULTS

from fsdp_testing.cases.drawing.choices import SeededChoices
from fsdp_testing.cases.drawing.drawing import CaseDrawer
from fsdp_testing.cases.drawing.features import Scope
from fsdp_testing.cases.drawing.normal_form import needs_of_case
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import needs_of
from fsdp_testing.judging.case_runner import ORDINARY

DRAWN = 1200
"""So many cases meet each feature many times: the rarest is on in one of twelve."""

BESIDE_CASES = {
    "deep_copies": "whoever runs a case copies the model at a marked point; no case says so",
    "modules_replaced": "whoever runs a case replaces a module at a marked point; no case says so",
    "parameters_replaced": "whoever runs a case replaces parameters at a marked point; no case says so",
    "unit_alone": "whoever runs a case calls a part at a marked point; no case says so",
    "units_after_forward": "whoever runs a case calls the model's last layer in its place; no case says so",
    "comm_hook": "whoever runs a case registers the hook around it; no case says so",
    "tensor_hooks": "whoever runs a case registers hooks around it; no case says so",
    "accumulation_hooks": "whoever runs a case registers hooks around it; no case says so",
    "early_hooks": "whoever runs a case registers hooks before it wraps the model; no case says so",
    "error_if_nonfinite": "gradients that are not finite are put there around a case, since the oracle has none",
    "loss_scaling": "whoever runs a case multiplies its losses; no case says so",
    "compiled": "whoever runs a case compiles its model; no case says so",
    "module_versions": "whoever runs a case exchanges its state with a plain model after it; no case says so",
    "extra_state": "whoever runs a case changes it and loads the state after it; no case says so",
    "strict_state": "whoever runs a case loads states that do not fit after it; no case says so",
    "reordered_optimizer": "whoever runs a case gives the parameters to later optimizers in another order; no case says so",
    "several_models": "whoever runs a case makes a second model; no case says so",
    "user_entries": "whoever runs a case puts entries into the optimizer after it; no case says so",
    "unit_trace": "whoever runs a case records its units; no case says so",
    "streams": "whoever runs a case records its streams; no case says so",
    "limited_gathers": "whoever runs a case records its streams; no case says so",
}
"""Capabilities that no operation, option or model of a case asks for, with the reason."""

AXES_OF_RUNS = {
    "tensor_parallel": "whoever runs checks gives all of their cases the axis; its faults: test_tensor_axis.py"
}
"""Capabilities that any check asks for, or none, as its run is asked."""


@cache
def asked_by_checks() -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """What each check asks for, with its cases at every place; and what those cases ask for by themselves."""
    asked: dict[str, frozenset[str]] = {}
    by_cases: set[str] = set()
    for check in CHECKS.values():
        places = check.places(frozenset(CAPABILITIES), (2, 4) if check.meshes else (2,), "gloo")
        cases = [case for place in places for case in check.build(place)]
        asked[check.name] = check.needs.union(*(needs_of(case) | case.required() for case in cases))
        # What a check asks for is asked by its cases, unless somebody does more than run them.
        by_cases.update(check.needs if check.mode is ORDINARY and check.judge is None else ())
        by_cases.update(*(needs_of(case) for case in cases))
    return asked, frozenset(by_cases)


@cache
def drawn() -> frozenset[str]:
    """What the fuzzer's cases ask for, of an implementation that claims everything."""
    drawer = CaseDrawer(Scope(world_sizes=(2, 4)))
    return frozenset().union(*(needs_of_case(drawer.draw(SeededChoices(seed))) for seed in range(DRAWN)))


@cache
def proofs() -> dict[str, set[str]]:
    """By capability the checks that ask for it, and that a fault of an implementation that claims it fails."""
    asked, _ = asked_by_checks()
    found: dict[str, set[str]] = defaultdict(set)
    for fault in FAULTS.values():
        for check in fault.checks:
            for tag in fault.adapter.capabilities & asked[check]:
                found[tag].add(check)
    return found


def test_a_planted_fault_proves_a_check_of_every_capability():
    assert [tag for tag in CAPABILITIES if tag not in AXES_OF_RUNS and not proofs()[tag]] == []


def test_every_capability_is_reached_by_cases_or_excused_by_name():
    reached = drawn() | asked_by_checks()[1]
    assert set(CAPABILITIES) - reached == {*BESIDE_CASES, *AXES_OF_RUNS}


def test_the_fuzzer_reaches_what_wrapping_brings():
    assert {"sync_module_states", "meta_init", "explicit_unshard", "uneven_parameters"} <= drawn()
