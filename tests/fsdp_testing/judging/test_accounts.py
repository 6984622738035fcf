"""What no number shows: gathered memory that stays, and collectives that nobody needs, are met by random cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import (
    Batch,
    Case,
    EditFullParameters,
    Forward,
    ForwardBackward,
    MixedPrecisionSpec,
    Move,
    Step,
    Verdict,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.overruns import budget_of
from fsdp_testing.oracle.accounts import AccountedProgram, program_for
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan

TWO = ({"kind": "linear", "name": "a", "out": 3}, {"kind": "linear", "name": "b", "out": 3})
TRAINED = case(
    micro(1),
    Step(),
    ForwardBackward(Batch(2), no_sync=True),
    micro(3),
    Forward(Batch(4), "eval"),
    nodes=TWO,
    strategy="full_shard",
    wrapping=WrappingPlan(("a", "b")),
)
FAULTS = {
    "fuzz_costly:NEVER_FREED": "kept full parameters",
    "fuzz_costly:GATHERS_TWICE": "excess gathers",
    "fuzz_costly:REDUCES_MORE": "excess reductions",
    "faults_trace:NeverFreed": "kept full parameters",
    "faults_trace:GathersTwice": "excess gathers",
    "faults_trace:ReducesTwice": "excess reductions",
}


def judged(name: str, asked: Case = TRAINED) -> JudgedCase:
    return CaseRunner(default_pool()).judge_batch(name, [asked])[0]


@pytest.mark.parametrize("name", ["fsdp_ref-wrapper", "fsdp_ref-composable", "fsdp_ref-flat", "torch-fsdp1"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_sound_implementations_keep_their_promises(name: str, strategy: str):
    from dataclasses import replace

    one = judged(name, replace(TRAINED, strategy=strategy))
    assert one.verdict is Verdict.PASS, one.judgement.why


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_no_number_shows_is_told(name: str):
    plain = case(micro(1), Step(), micro(2), strategy="full_shard", nodes=TWO)
    one = judged(name, plain if name.startswith("faults_trace") else TRAINED)
    assert str(one.signature).startswith(FAULTS[name]), one.judgement
    assert one.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "name", [next(iter(FAULTS)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*FAULTS][1:])]
)
def test_it_is_met_within_500_random_cases(name: str, tmp_path: Path):
    adapter = registry.load(name)
    plan = Plan(
        adapter,
        Scope(adapter.capabilities),
        tmp_path,
        seconds=None,
        examples=500,
        lanes=1,
        known=shipped_known("fsdp_ref-composable"),
        stop_at_first=True,
        shrink_seconds=200,
    )
    tally = Campaign(plan, default_pool(), lambda _: None, lambda *_: None).run()
    found = [discovery for discovery in tally.discovered if discovery.confirmed]
    assert found, tally.verdicts
    assert str(found[0].signature).startswith(FAULTS[name]), found[0].sentence()
    assert len(found[0].case.program) <= 2, found[0].case.program


def test_what_gathers_in_its_place_is_not_counted_as_an_implementations_own():
    edited = case(micro(1), EditFullParameters(("*",), 0.5), micro(2), strategy="full_shard", nodes=TWO)
    assert "full_parameters" in registry.load("fuzz_costly:GATHERED_FOR").missing
    one = judged("fuzz_costly:GATHERED_FOR", edited)
    assert one.verdict is Verdict.PASS, one.judgement.why


def test_who_does_not_tell_of_units_is_not_asked():
    assert not isinstance(program_for(TRAINED, registry.load("torch-ddp"), 0), AccountedProgram)
    assert isinstance(program_for(TRAINED, registry.load("torch-fsdp2"), 0), AccountedProgram)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("torch-fsdp2", "prefetch-after-lone-forward"),
        ("torch-fsdp2", "prefetch-across-forwards"),
        ("torch-fsdp1", "unused-unit-stays-gathered"),
    ],
)
def test_what_torch_is_known_to_waste_is_recognized(name: str, rule: str):
    known = shipped_known(name)
    (example,) = [asked for expected, asked in known.examples() if expected.name == rule]
    one = judged(name, example)
    assert one.signature is not None, one.judgement
    found = known.recognize(one.signature, example)
    assert found is not None
    assert found.name == rule


class TestBudget:
    def test_it_counts_every_parameter_with_its_padding_once(self):
        asked = case(micro(1), nodes=({"kind": "linear", "name": "a", "out": 3, "bias": False},), width=5)
        # Three rows of five float64 on two ranks: four rows; one unit with its alignment.
        assert budget_of(asked).padded_bytes == 4 * 5 * 8 + 2 * 16

    def test_a_cast_to_a_wider_dtype_counts(self):
        narrow = case(micro(1), dtype="float32")
        wide = case(Move("float64"), micro(1), dtype="float32")
        # What float32 aligned by four elements stays so, at eight bytes each.
        assert budget_of(wide).padded_bytes == 2 * budget_of(narrow).padded_bytes

    def test_parameters_are_aligned_in_the_dtype_that_computes(self):
        plain = case(micro(1), dtype="float32")
        low = replace(plain, mixed_precision=MixedPrecisionSpec("float16"))
        assert budget_of(low).padded_bytes > budget_of(plain).padded_bytes
        assert budget_of(replace(plain, mixed_precision=MixedPrecisionSpec())) == budget_of(plain)

    def test_what_is_called_twice_is_used_twice_and_a_mesh_reduces_twice(self):
        twice = ({"kind": "group", "name": "g", "calls": 2, "nodes": [{"kind": "linear", "name": "a", "out": 3}]},)
        asked = case(micro(1), nodes=twice, world=WorldSpec(4, mesh=(2, 2)), wrapping=WrappingPlan(("g",)))
        budget = budget_of(asked)
        assert (budget.uses, budget.reductions) == (2, 4)

    def test_what_cannot_be_looked_into_may_be_gathered_again(self):
        hidden = (
            {"kind": "group", "name": "g", "returns": "opaque", "nodes": [{"kind": "linear", "name": "a", "out": 3}]},
        )
        assert budget_of(case(micro(1), nodes=hidden)).uses == 2

    def test_nothing_is_said_of_recomputed_modules_and_models_of_the_zoo(self):
        from dataclasses import replace

        from fsdp_testing.cases.records import ModelSpec

        assert budget_of(case(micro(1), wrapping=WrappingPlan(checkpointed=("a",)))) is None
        assert budget_of(replace(TRAINED, model=ModelSpec("mlp"))) is None
