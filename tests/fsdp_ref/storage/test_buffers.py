"""Buffers that are freed and refilled in place, the pool of short-lived ones, and containers of tensors."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fsdp_ref.layout import FlatLayout, ParamSpec
from fsdp_ref.storage.memory import FlatBuffer, ScratchPool
from fsdp_ref.storage.precision import cast_floating, map_tensors
from fsdp_ref.storage.views import flat_views, gap_views

CPU = torch.device("cpu")


@pytest.mark.covers("STRAT-10")
def test_views_outlive_the_memory_and_see_it_again():
    buffer = FlatBuffer(10, torch.float32, CPU)
    assert not buffer.allocated
    buffer.allocate()
    view = buffer.tensor[2:4]
    buffer.free()
    assert view.untyped_storage().size() == 0
    for value in (1.0, 2.0):
        buffer.allocate()
        buffer.allocate()
        assert view.untyped_storage().size() == 40
        buffer.tensor.fill_(value)
        assert view.tolist() == [value, value]
        buffer.free()
        buffer.free()
        assert view.untyped_storage().size() == 0


def test_an_empty_buffer_is_always_there():
    buffer = FlatBuffer(0, torch.float32, CPU)
    buffer.allocate()
    buffer.free()
    assert buffer.allocated


def test_the_pool_reuses_and_does_not_grow():
    pool = ScratchPool(spare=2)
    first = pool.take(100, torch.float32, CPU)
    pool.give(first)
    assert pool.take(100, torch.float32, CPU) is first
    taken = [pool.take(size, torch.float32, CPU) for size in range(1, 50)]
    for each in taken:
        pool.give(each)
    assert pool.free_bytes <= 2 * 400
    assert pool.take(100, torch.float64, CPU).dtype == torch.float64


@pytest.mark.covers("FLAT-14")
def test_views_and_gaps_cover_a_flat_tensor():
    specs = [ParamSpec.of("a", (3,)), ParamSpec.of("b", (2, 3), (1, 2)), ParamSpec.of("c", ())]
    layout = FlatLayout.build(specs, alignment_numel=4, pad_to_multiple=8)
    flat = torch.full((layout.numel + 3,), -1.0)
    for index, view in enumerate(flat_views(flat, layout)):
        view.fill_(index)
        assert view.stride() == specs[index].stride
    for gap in gap_views(flat, layout):
        assert (gap == -1).all()
        gap.fill_(9)
    assert not (flat == -1).any()


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    b: str = "b"


@pytest.mark.covers("IO-01", "IO-02", "IO-03", "IO-04", "B075")
def test_containers_keep_their_types():
    tensor = torch.ones(2)
    default = collections.defaultdict(list, {"k": [tensor]})
    value = [
        Pair(tensor, 1),
        Frozen(tensor),
        {"x": (tensor, None)},
        collections.OrderedDict(y=tensor),
        default,
        {tensor},
    ]
    cast = cast_floating(value, torch.float64)
    assert [type(each) for each in cast] == [type(each) for each in value]
    assert cast[0].a.dtype == cast[1].a.dtype == cast[2]["x"][0].dtype == cast[3]["y"].dtype == torch.float64
    assert cast[4].default_factory is list
    assert next(iter(cast[5])).dtype == torch.float64
    assert value[0].a is tensor
    assert map_tensors(value, lambda t: t) is value
    packed = cast_floating(pack_sequence([torch.ones(3), torch.ones(2)]), torch.float64)
    assert packed.data.dtype == torch.float64
    assert cast_floating(torch.ones(1, dtype=torch.int64), torch.float64).dtype == torch.int64
