"""Over tensor parallelism torch multiplies parts by other kernels: bounds allow for each rounding of an inner product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    MixedPrecisionSpec,
    ModelSpec,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.replay import Replay

TREE = {"width": 3, "nodes": [{"kind": "linear", "name": "a"}, {"kind": "linear", "out": 1, "act": False, "name": "b"}]}
CUT = Case(
    ModelSpec("tree", dtype="float32", tree=TREE),
    WorldSpec(4, tensor_parallel=2),
    (ForwardBackward(Batch(1, rows=(1,), scale=8.0)),),
    wrapping=WrappingPlan(layouts=(("b", "colwise"),)),
)
WHOLE = replace(CUT, world=WorldSpec(4), wrapping=WrappingPlan())
UNIT = 2.0**-24


def moved(case: Case, disturbance: Disturbance) -> dict[str, float]:
    """How far the replay's own weights are from the stored ones, relatively."""
    replay = Replay(case, disturbance=disturbance)
    replay.refresh()
    return {
        fqn: float((replay.compute[fqn] / parameter - 1).detach().abs().max())
        for fqn, parameter in replay.parameters.items()
    }


def test_weights_of_cut_layers_are_moved_by_a_rounding_for_each_summand_and_part():
    apart = moved(CUT, Disturbance(0, 10, displaced=True))
    assert apart["b.weight"] == pytest.approx((3 + 2) * UNIT, rel=0.5)
    assert [fqn for fqn, by in apart.items() if by] == ["b.weight"]


@pytest.mark.parametrize(
    ("case", "disturbance"), [(WHOLE, Disturbance(0, 10, displaced=True)), (CUT, Disturbance(0, 0, displaced=True))]
)
def test_nothing_is_moved_where_nothing_is_cut_or_no_rounding_is_asked_for(case: Case, disturbance: Disturbance):
    assert not any(moved(case, disturbance).values())


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_output_may_be_off_by_what_another_kernel_does(lockstep: bool):
    """Its inner product is the small difference of larger numbers, of which no replay with torch's own kernel knows."""
    reduced = replace(CUT, mixed_precision=MixedPrecisionSpec(reduce_dtype="float32"))
    expected = oracle.expect_lockstep(reduced, None, {}) if lockstep else oracle.expect_free(CUT)
    (point,) = [point for point in expected.points if not point.snapshot]
    output = point.quantities[Quantity("result", "output.0", "", 0)]
    replay = Replay(CUT)
    weight, hidden = replay.parameters["b.weight"].detach(), []
    replay.replicas[0].get_submodule("b").register_forward_pre_hook(lambda _module, args: hidden.append(args[0]))
    replay.forward(0, CUT.program[0].batches()[0])
    summands = float((hidden[0].detach().abs() @ weight.abs().t()).max())
    assert torch.as_tensor(output.bound).max() >= UNIT * summands


def test_products_in_16_bits_are_not_moved_in_lockstep():
    """They are added up in float32, of whose roundings their last bits say nothing."""
    for low in (MixedPrecisionSpec("bfloat16"), MixedPrecisionSpec("float16", "float32")):
        assert oracle.computes_in_16_bits(replace(CUT, mixed_precision=low))
    assert not oracle.computes_in_16_bits(replace(CUT, mixed_precision=MixedPrecisionSpec(reduce_dtype="bfloat16")))
    assert not any(moved(CUT, Disturbance(0, 0, displaced=True)).values())
    assert any(moved(CUT, Disturbance(0, 0, displaced=True, products=True)).values())
