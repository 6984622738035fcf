"""The values of a gradient by themselves: no process group, no module, no users."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref.handle.accumulated import Accumulated, Uses
from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap
from fsdp_ref.storage.precision import Precision

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def layout() -> FlatLayout:
    """Three elements and four."""
    shapes = {"a": (3,), "b": (4,)}
    return FlatLayout.build([ParamSpec.of(name, shape) for name, shape in shapes.items()], pad_to_multiple=2)


def accumulated(world_size: int = 2, rank: int = 0, precision: Precision = Precision(F32, F32, F32)) -> Accumulated:
    return Accumulated(ShardMap(layout(), world_size), rank, precision, CPU, offloads=False)


def test_local_gradients_add_up_and_are_taken_once_with_who_is_in_them():
    values = accumulated()
    values.add_local([torch.ones(3), None])
    values.add_local([torch.ones(3), None])
    local, used = values.take_local()
    assert local is not None and local[:3].tolist() == [2.0] * 3 and not local[3:].any()
    assert used == [True, False]
    assert values.take_local() == (None, [False, False])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_other_ranks_used_is_read_from_the_sum(rank: int):
    """This rank used `a` alone; no rank used `b`, or another one did."""
    for by_another in (False, True):
        values = accumulated(rank=rank)
        full = torch.zeros(8)
        values.marks.stamp(full, [True, by_another])
        shard = full[4 * rank : 4 * rank + 4].clone()
        uses = values.uses_in(shard, [True, False], [True, True])
        assert uses.unused_by_all is not None
        values.add_reduced(shard, uses)
        assert values.used == [True, False], "nobody has read the marks yet"
        values.read_uses()
        assert values.used == [True, by_another]


def test_a_rank_that_used_everything_reads_no_marks():
    values = accumulated()
    assert values.uses_in(torch.ones(4), [True, True], [True, True]).unused_by_all is None
    assert values.uses_in(torch.ones(4), [True, False], [True, False]).unused_by_all is None, "what trains is known"


def test_what_rounding_takes_is_added_with_the_next_sum():
    """In bfloat16 256 + 1 is 256; two ones are not lost."""
    values = accumulated(precision=Precision(BF16, BF16, F32))
    uses = Uses([True, True])
    for value in (256.0, 1.0, 1.0):
        values.add_reduced(torch.full((4,), value, dtype=F32), uses)
    assert values.reduced_S is not None and values.reduced_S.dtype == BF16
    assert values.reduced_S.tolist() == [258.0] * 4


def test_zeroed_gradients_stay_zeros_and_keep_their_uses():
    values = accumulated()
    values.add_reduced(torch.ones(4), Uses([True, False]))
    values.add_local([None, torch.ones(4)])
    assert values.both
    values.become_zeros()
    assert values.local_F is None
    assert values.reduced_S is not None and not values.reduced_S.any()
    assert values.used == [True, True]


def test_a_failed_pass_drops_what_is_on_its_way_to_the_host():
    values = Accumulated(ShardMap(layout(), 2), 0, Precision(F32, F32, F32), CPU, offloads=True)
    values.add_reduced(torch.ones(4), Uses([True, False], torch.tensor([False, True])))
    values.drop_arriving([True, True])
    assert values.reduced_S is None
    assert values.used == [True, True]
    values.read_uses()
    assert values.used == [True, True], "the marks went with it"
