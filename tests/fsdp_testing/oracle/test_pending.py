"""A sum that cancels is known no better than its summands: the bound of lockstep counts what was added, not what is left."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Clip,
    ForwardBackward,
    MixedPrecisionSpec,
    ModelSpec,
    SeveralForwards,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.oracle import disturbance
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.reduction import LocalGradients, PendingGradients, gradients_of, mean_size, roundings
from fsdp_testing.oracle.replay import Replay


def local(value: float) -> LocalGradients:
    tensor = torch.tensor([value])
    return LocalGradients({"w": tensor}, {"w": tensor.abs().double()})


def test_sums_cancel_and_sizes_do_not():
    pending = PendingGradients()
    assert not pending
    for value in (3.0, -2.0, -1.0):
        pending.add(local(value))
    assert pending
    assert pending.values["w"].item() == 0.0
    assert pending.sizes["w"].item() == 6.0
    nothing = PendingGradients()
    assert mean_size([pending, nothing], "w", torch.zeros(1, dtype=torch.float64)).tolist() == [3.0]


def test_what_is_added_does_not_change_what_was_given():
    given = local(1.0)
    pending = PendingGradients()
    pending.add(given)
    pending.add(local(1.0))
    assert given.values["w"].item() == given.sizes["w"].item() == 1.0


def test_each_call_of_a_unit_counts_as_a_summand():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    noted: disturbance.Contributions = {}
    disturbance.draw_borders(model, WrappingPlan(("0",)), noted)
    x = torch.ones(1, 1)
    (2 * model[0](x) - 5 * model[0](x)).sum().backward()
    one = gradients_of(dict(model.named_parameters()), noted)
    assert (one.values["0.weight"].item(), one.sizes["0.weight"].item()) == (-3.0, 7.0)


def test_a_parameter_that_is_watched_in_one_of_two_places_counts_with_its_whole_gradient_at_least():
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([-4.0])
    one = gradients_of({"w": weight}, {id(weight): torch.tensor([1.0], dtype=torch.float64)})
    assert one.sizes["w"].item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_no_order_of_additions_leaves_the_bound(dtype: torch.dtype, scale: float):
    draw = random.Random(7)
    for _ in range(200):
        summands = [torch.tensor(draw.uniform(-1, 1) * scale).to(dtype) for _ in range(4)]
        sums = []
        for order in itertools.permutations(summands):
            chain = ((order[0] + order[1]) + order[2]) + order[3]
            pairs = (order[0] + order[1]) + (order[2] + order[3])
            sums += [
                chain.double(),
                pairs.double(),
                (order[0] / 2 + order[1] / 2 + order[2] / 2 + order[3] / 2).double() * 2,
            ]
        size = torch.tensor(sum(abs(float(summand)) for summand in summands), dtype=torch.float64)
        # Three additions, and for the halves a rounding of each and of the double, on either side.
        bound = roundings(2 * (3 + 5), (dtype,), size)
        assert max(sums) - min(sums) <= bound


MIXED = Case(
    ModelSpec("called_twice", dtype="float32"),
    WorldSpec(2),
    (ForwardBackward(Batch(1, (4,)), no_sync=True), ForwardBackward(Batch(2, (3,)))),
    seed=51160,
    wrapping=WrappingPlan(("again",)),
    strategy="full_shard",
    mixed_precision=MixedPrecisionSpec(param_dtype="bfloat16"),
)


def last_slack(case: Case, name: str) -> torch.Tensor:
    replay = Replay(case, Division(1, 2))
    points = [point for point in replay.run(observe_all=True) if Quantity("gradient", name) in point.slack]
    return torch.as_tensor(points[-1].slack[Quantity("gradient", name)][0])


def test_gradients_of_no_sync_that_cancel_are_bounded_by_their_summands():
    slack = last_slack(MIXED, "again.weight")
    parts = []
    for operation in MIXED.program:
        replay = Replay(MIXED, Division(1, 2))
        replay.refresh()
        parts += [replay.local_gradients(rank, operation.batch)[1].values["again.weight"] for rank in range(2)]
    size = sum(part.float().abs() for part in parts) / 2
    total = (sum(part.float() for part in parts) / 2).abs()
    assert bool((total < size / 8).any())  # some do cancel
    # Two uses of the kept gradient and one addition over ranks, on either side. The sizes themselves are summed in float32.
    torch.testing.assert_close(slack, roundings(2 * 3, (torch.bfloat16,), size), rtol=8 * 2.0**-24, atol=0.0)


def test_without_no_sync_two_ranks_agree_to_the_bit():
    alone = replace(MIXED, program=(ForwardBackward(Batch(1, (4,))),))
    assert not bool(last_slack(alone, "again.weight").any())


def test_every_reduction_of_one_operation_counts():
    several = SeveralForwards((Batch(2, (3,)), Batch(3, (3,))))
    one = replace(MIXED, program=(MIXED.program[0], SeveralForwards(several.micro_batches[:1])))
    both = replace(MIXED, program=(MIXED.program[0], several))
    assert bool((last_slack(both, "again.weight") > last_slack(one, "again.weight")).all())


def test_casts_to_float16_underflow():
    clipped = replace(
        MIXED,
        program=(ForwardBackward(Batch(1, (4,))), Clip(1e-6), ForwardBackward(Batch(2, (3,), scale=2.0**-12))),
        strategy="no_shard",
        mixed_precision=MixedPrecisionSpec(param_dtype="float16"),
    )
    assert float(last_slack(clipped, "again.weight").min()) >= 3 * 2.0**-25
