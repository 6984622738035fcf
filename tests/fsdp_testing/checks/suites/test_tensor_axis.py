"""Over two axes of a mesh: healthy implementations pass, and each fault of tensor parallelism is caught."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fsdp_testing.adapters.registry import adapter_of
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import Save
from fsdp_testing.cases.records import (
    Case,
    Clip,
    FailureKind,
    MixedPrecisionSpec,
    Observe,
    Reload,
    Step,
    Verdict,
    WorldSpec,
)
from fsdp_testing.checks.conformance import shared_runner
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    PLAIN_SGD,
    Place,
    accumulated,
    cases,
    iteration,
    micro_batch,
)
from fsdp_testing.checks.suites.other_worlds import judge_moved
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.oracle.quantities import Comparison
from fsdp_testing.oracle.tensor_axis import layouts_of, over_two_axes

EVERYTHING = (
    *iteration(0, Clip(0.1), Observe()),
    *accumulated(1, 2),
    Clip(0.1, math.inf),
    Step(),
    Reload(),
    *iteration(3),
    Save(),
    Reload("sharded"),
    micro_batch(4),
)


def on_four_ranks(*args: Any, **fields: Any) -> Case:
    (case,) = map(Place(4, "full_shard").put, cases(*args, **fields))
    return case


def judge(name: str, case: Case, **how: Any) -> JudgedCase:
    return shared_runner().judge(name, over_two_axes(case, 2), **how)


# ---------------------------------------------------------------------------------------------- the axis in a case


def test_layouts_are_chosen_by_kinds_of_modules():
    gpt = layouts_of(MODELS["gpt"].build(0), 2, MODELS["gpt"].elementwise_before)
    assert gpt == {
        "wte": "replicated",  # the head shares its weight
        "wpe": "rowwise",
        **{
            f"blocks.{block}.{name}": layout
            for block in (0, 1)
            for name, layout in {
                "norm1": "sequence",
                "attention.qkv": "colwise",
                "attention.out": "rowwise",
                "norm2": "sequence",
                "mlp.0": "colwise_cut",
                "mlp.2": "rowwise_cut",
            }.items()
        },
        "norm": "sequence",
        "head": "replicated",
    }
    mlp = MODELS["mlp"]
    ignored = layouts_of(mlp.build(0), 2, mlp.elementwise_before, ("layers.0.",))
    assert ignored == {"layers.1": "colwise_cut", "layers.2": "rowwise_cut"}
    # Parts of unequal sizes are put together before the next layer.
    assert set(layouts_of(mlp.build(0), 3, mlp.elementwise_before).values()) == {"colwise", "rowwise"}


# ---------------------------------------------------------------------------------------------- healthy implementations


# FSDP2 loads no part whose rows its ranks do not divide, which gpt has.
@pytest.mark.parametrize(
    ("name", "model"), [("torch-fsdp2", "mlp"), ("fsdp_ref-wrapper", "gpt"), ("fsdp_ref-composable", "gpt")]
)
def test_trains_clips_accumulates_saves_and_loads(name: str, model: str):
    found = judge(name, on_four_ranks(model, *EVERYTHING, optimizer=ADAMW))
    assert found.outcome.verdict is Verdict.PASS, found
    assert found.outcome.comparisons > 100


@pytest.mark.parametrize("name", ["torch-fsdp2", "fsdp_ref-composable"])
def test_low_precision_stays_within_the_roundings_of_parts(name: str):
    precision = MixedPrecisionSpec("bfloat16", "float32")
    case = on_four_ranks(
        "gpt", *iteration(0), micro_batch(1), dtype="float32", precision=precision, optimizer=PLAIN_SGD
    )
    found = judge(name, case, comparison=LOCKSTEP)
    assert found.outcome.verdict is Verdict.PASS, found
    assert found.outcome.worst_ratio > 0


def hybrid(mesh: tuple[int, int], *program: Any) -> Case:
    place = Place(4, "hybrid_shard", mesh=mesh)
    (case,) = map(place.put, cases("mlp", *program, optimizer=PLAIN_SGD))
    return case


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["torch-fsdp2", "fsdp_ref-composable"])
def test_hybrid_sharding_has_a_third_axis(name: str, mesh: tuple[int, int]):
    found = judge(name, hybrid(mesh, *accumulated(0, 1), Observe(), Step(), *iteration(2)))
    assert found.outcome.verdict is Verdict.PASS, found


def test_a_mesh_has_one_rank_of_each_model():
    places = CHECKS["hybrid.trained"].places(frozenset({"hybrid"}), (4, 8), "gloo", tensor_parallel=2)
    assert {(place.world_size, place.mesh) for place in places} == {(8, (2, 2))}


def test_what_two_by_two_ranks_saved_is_loaded_by_other_meshes():
    seen: list[WorldSpec] = []

    class Noting(CaseRunner):
        def judge(self, implementation: Any, case: Case, *args: Any, **how: Any) -> JudgedCase:
            seen.append(case.world)
            return super().judge(implementation, case, *args, **how)

    case = over_two_axes(on_four_ranks("uneven", *iteration(0), optimizer=ADAMW), 2)
    found = judge_moved(Noting(), adapter_of("fsdp_ref-composable"), case, Comparison())
    assert found.outcome.verdict is Verdict.PASS, found
    assert [(world.replicas, world.tensor_parallel) for world in seen] == [(2, 2), (1, 2), (2, 1), (1, 1), (2, 2)]


# ---------------------------------------------------------------------------------------------- faults


CLIPPED = on_four_ranks("mlp", micro_batch(0), Clip(0.1), dtype="float32")


@pytest.mark.parametrize(
    ("fault", "case", "quantity"),
    [
        ("PARTIAL_SUMS", on_four_ranks("mlp", micro_batch(0)), " on rank "),
        ("OWN_GRADIENT", on_four_ranks("gpt", micro_batch(0)), "norm"),
        ("NORM_OF_ONE_AXIS", CLIPPED, "total norm"),
        ("COUNTED_TWICE", CLIPPED, "total norm"),
        ("FIRST_PART", on_four_ranks("mlp", Save()), "state.layers."),
        ("WITHOUT_REPLICAS", hybrid((2, 1), micro_batch(0)), "gradient"),
    ],
)
def test_a_fault_of_tensor_parallelism_is_caught(fault: str, case: Case, quantity: str):
    found = judge(f"faults_tensor_axis:{fault}", case, closely=True)
    assert found.finding is not None
    assert found.finding.kind in (FailureKind.DIVERGED, FailureKind.DISAGREED), found.finding
    assert quantity in found.finding.quantity
