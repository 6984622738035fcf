"""What is not claimed is probed: what is right, what refuses and what is silently wrong are kept apart."""

from __future__ import annotations

import pytest
from narrow import CAPABILITY

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.conformance import run_check
from fsdp_testing.checks.suites.beyond_claims import Limit, probe, probes, variant
from fsdp_testing.judging.case_runner import CaseRunner

CHECK = "accumulation.several_forwards"


@pytest.mark.parametrize(
    ("name", "limit", "text"),
    [("RIGHT", Limit.WORKS, ""), ("SILENT", Limit.SILENT, "is off by"), ("REFUSING", Limit.REFUSES, "one forward")],
)  # fmt: skip
def test_a_probe_tells_silence_from_refusal(name, limit, text):
    adapter = registry.load(f"narrow:{name}")
    assert run_check(f"narrow:{name}", CHECK).verdict is Verdict.NOT_CLAIMED
    found = probe(CaseRunner(), adapter, CAPABILITY)
    assert (found.limit, found.check) == (limit, CHECK)
    assert text in found.text


def test_a_refusal_that_did_not_come_is_silence_though_it_is_told_by_an_exception():
    found = probe(CaseRunner(), registry.load("narrow:OUTDATED"), "outdated_backward")
    assert (found.limit, found.check) == (Limit.SILENT, "backward.outdated")


def test_a_variant_claims_one_capability_more_and_is_found_by_its_name():
    adapter = registry.load(f"fsdp_testing.checks.suites.beyond_claims:torch-fsdp1+{CAPABILITY}")
    assert adapter.capabilities - registry.load("torch-fsdp1").capabilities == {CAPABILITY}
    assert variant(f"torch-fsdp1+{CAPABILITY}").name == "torch-fsdp1"


def test_parameters_of_equal_size_that_differ_by_rank_are_probed():
    asked = {check.name for check in probes(registry.load("torch-fsdp2"), "unused_parameters_differ")}
    assert {"unused.units_swapped_between_ranks", "unused.parameters_swapped_between_ranks"} <= asked


def test_strategies_that_are_not_claimed_are_probed_by_training_under_them():
    asked = probes(registry.load("torch-ddp"), "full_shard")
    assert asked
    assert {check.strategies for check in asked} == {("full_shard",)}


def test_the_second_axis_is_probed_by_plain_training_over_it():
    asked = probes(registry.load("torch-ddp"), "tensor_parallel")
    assert {check.name.partition(".")[0] for check in asked} == {"training"}


@pytest.mark.parametrize(
    "check",
    [
        "construction.memory_of_shares",
        "full_state_dict.not_finite",
        "loss_scaling.skips_together",
        "training.not_a_number",
        "training.two_models",
        "unshard.gathers",
    ],
)
def test_an_adapter_that_gathers_to_show_parameters_is_not_judged_by_its_pieces(check):
    """Gathered parameters are whole, and have no gradients: each of these called a right implementation wrong."""
    result = run_check("narrow:GATHERED", check)
    assert result.verdict is Verdict.NOT_CLAIMED
    assert "gathers parameters to show them" in result.explanation


@pytest.mark.parametrize("check", ["conversion.deepcopy", "conversion.deepcopy_in_no_sync", "conversion.copied"])
def test_a_copy_that_shows_no_gradients_is_judged_by_its_step(check):
    result = run_check("narrow:GATHERED", check)
    assert result.verdict is Verdict.PASS, result.explanation


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        ("mixed_precision.evaluated", Verdict.PASS),
        ("comm_hook.called_once_per_unit", Verdict.PASS),
        ("optim_state.some_ranks", Verdict.PASS),
        ("unshard.gathers", Verdict.NOT_CLAIMED),
        ("sharded_state_dict.of_another_rank", Verdict.NOT_CLAIMED),
    ],
)
def test_one_rank_is_asked_about_what_one_rank_can_show(check, verdict):
    result = run_check("fsdp_ref-composable", check, world_sizes=(1,))
    assert result.verdict is verdict, result.explanation
    if verdict is Verdict.NOT_CLAIMED:
        assert "it needs shards on several ranks" in result.explanation
