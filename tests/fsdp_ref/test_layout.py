"""The layout: what holds for every one, and worked examples. Drawn shapes, orders, ties, alignments and worlds; no ranks.

The second half of each comparison is written from the definition and shares no code with the package: a list of
owners, one entry per element of the flat buffer, cut by plain loops; or a real flat tensor cut by ``torch.chunk``.
"""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap, Span, is_dense, is_row_major, row_major_stride
from fsdp_ref.torch_names.inclusive_view import (
    is_padding_mask,
    numels_with_padding,
    segments,
    shard_metadata,
    shard_param_infos,
)

settings.register_profile("layout", deadline=None, max_examples=150)
settings.load_profile("layout")

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
WORLDS = st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 1024]))
ALIGNMENTS = st.sampled_from([1, 2, 4, 8, 3])
PADS = st.sampled_from([1, 2, 3, 4, 8])


@dataclass(frozen=True)
class Drawn:
    """A parameter as drawn: what the layout is given, and a tensor with recognisable values."""

    spec: ParamSpec
    value: torch.Tensor


@st.composite
def stored_tensors(draw, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor of any rank whose elements are 1, 2, ... in logical order, stored in any dense or strided way."""
    shape = draw(SHAPES)
    value = torch.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(shape)
    kind = draw(st.sampled_from(["contiguous", "permuted", "gappy"]))
    if kind == "permuted" and len(shape) > 1:
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(dim) for dim in range(len(shape))]
        value = value.permute(order).contiguous().permute(back)
    if kind == "gappy" and shape:
        value = torch.stack([value, value], dim=-1)[..., 0]
    return value


@st.composite
def parameter_lists(draw, max_size: int = 6) -> list[Drawn]:
    tensors = draw(st.lists(stored_tensors(), max_size=max_size))
    drawn = []
    for index, value in enumerate(tensors):
        aliases = [f"tied{index}_{k}" for k in range(draw(st.integers(0, 2)))]
        drawn.append(Drawn(ParamSpec.of(f"p{index}", value.shape, value.stride(), aliases), value))
    return drawn


@st.composite
def layouts(draw) -> FlatLayout:
    params = draw(parameter_lists())
    return FlatLayout.build([d.spec for d in params], alignment_numel=draw(ALIGNMENTS), pad_to_multiple=draw(PADS))


def naive_buffer(params: list[ParamSpec], alignment: int, multiple: int) -> list[tuple[int, int] | None]:
    """One entry per flat element: (parameter, element number), or None for padding."""
    buffer: list[tuple[int, int] | None] = []
    for index, param in enumerate(params):
        while len(buffer) % alignment:
            buffer.append(None)
        buffer.extend((index, k) for k in range(math.prod(param.shape)))
    while len(buffer) % multiple:
        buffer.append(None)
    return buffer


def naive_shards(buffer: list[tuple[int, int] | None], world: int) -> list[list[tuple[int, int] | None]]:
    size = math.ceil(len(buffer) / world)
    return [buffer[rank * size : (rank + 1) * size] for rank in range(world)]


def flatten(layout: FlatLayout, drawn: list[Drawn], padding: float = float("nan")) -> torch.Tensor:
    """Write each tensor in its storage order at its place; NaN everywhere else, so that a leak shows."""
    flat = torch.full((layout.numel,), padding, dtype=torch.float64)
    for index, item in enumerate(drawn):
        span = layout.span(index)
        flat[span.as_slice()] = item.value.permute(item.spec.storage_order).reshape(-1)
    return flat


@pytest.mark.covers("FLAT-02", "FLAT-13", "FLAT-18", "FLAT-19")
@given(parameter_lists(), ALIGNMENTS, PADS)
def test_offsets_agree_with_a_model_that_writes_out_every_element(drawn, alignment, multiple):
    specs = [d.spec for d in drawn]
    layout = FlatLayout.build(specs, alignment_numel=alignment, pad_to_multiple=multiple)
    buffer = naive_buffer(specs, alignment, multiple)
    assert layout.numel == len(buffer)
    written: list[tuple[int, int] | None] = [None] * layout.numel
    for index in range(len(layout)):
        span = layout.span(index)
        for k in range(span.numel):
            assert written[span.start + k] is None
            written[span.start + k] = (index, k)
    assert written == buffer
    mask, numels = is_padding_mask(layout), numels_with_padding(layout)
    assert len(mask) == len(numels)
    assert sum(numels) == layout.numel
    assert tuple(n for n, pad in zip(numels, mask, strict=True) if not pad) == tuple(d.spec.numel for d in drawn)
    assert layout.params_numel == sum(d.value.numel() for d in drawn)


@pytest.mark.covers("FLAT-14", "FLAT-05")
@given(parameter_lists(), ALIGNMENTS, PADS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_unflattening_gives_back_every_tensor_and_no_padding(drawn, alignment, multiple, dtype):
    layout = FlatLayout.build([d.spec for d in drawn], alignment_numel=alignment, pad_to_multiple=multiple)
    flat = flatten(layout, drawn).to(dtype)
    for index, item in enumerate(drawn):
        span = layout.span(index)
        piece = flat[span.as_slice()]
        back = torch.as_strided(piece.clone(), item.spec.shape, item.spec.stride)
        assert torch.equal(back, item.value.to(dtype))
        if item.value.is_contiguous():
            assert item.spec.contiguous


@pytest.mark.covers("FLAT-06", "FLAT-07", "STRAT-08")
@given(layouts(), WORLDS)
def test_shards_partition_the_flat_range(layout, world):
    shards = ShardMap(layout, world)
    end = 0
    for rank in range(world):
        span = shards.shard_span(rank)
        assert span.start == end
        end = span.stop
        assert span.numel + shards.padding(rank) == shards.shard_numel
        assert shards.padding(rank) >= 0
    assert end == layout.numel
    assert shards.padded_numel == shards.shard_numel * world
    assert shards.padded_numel - layout.numel == sum(shards.padding(rank) for rank in range(world))


@pytest.mark.covers("FLAT-06", "FLAT-09")
@given(parameter_lists(), ALIGNMENTS, PADS, WORLDS)
def test_every_parameter_element_lives_in_exactly_one_shard(drawn, alignment, multiple, world):
    specs = [d.spec for d in drawn]
    layout = FlatLayout.build(specs, alignment_numel=alignment, pad_to_multiple=multiple)
    shards = ShardMap(layout, world)
    expected = naive_shards(naive_buffer(specs, alignment, multiple), world)
    seen: dict[tuple[int, int], int] = {}
    for rank in range(world):
        held = dict(enumerate(expected[rank]))
        for index, piece, offset in shards.param_spans(rank):
            assert piece.numel > 0
            for k in range(piece.numel):
                assert held.pop(offset + k) == (index, piece.start + k)
                assert (index, piece.start + k) not in seen
                seen[index, piece.start + k] = rank
        assert all(left is None for left in held.values()), "a parameter element that no piece names"
    assert len(seen) == sum(spec.numel for spec in specs)
    for index in range(len(specs)):
        ranks = {rank for (param, _), rank in seen.items() if param == index}
        assert sorted(ranks) == list(shards.owner_ranks(index))


@pytest.mark.covers("FLAT-06", "FLAT-09", "FLAT-10", "FLAT-12")
@given(parameter_lists(), ALIGNMENTS, PADS, WORLDS, st.data())
def test_metadata_of_a_rank_is_what_slicing_the_real_flat_tensor_gives(drawn, alignment, multiple, world, data):
    layout = FlatLayout.build([d.spec for d in drawn], alignment_numel=alignment, pad_to_multiple=multiple)
    shards = ShardMap(layout, world)
    flat = flatten(layout, drawn)
    chunks = torch.chunk(flat, world)
    rank = data.draw(st.integers(0, world - 1))
    local = chunks[rank] if rank < len(chunks) else flat.new_empty(0)
    assert local.numel() == shards.shard_span(rank).numel
    assert chunks[0].numel() == shards.shard_numel
    infos = shard_param_infos(shards, rank)
    for info, item in zip(infos, drawn, strict=True):
        whole = item.value.permute(item.spec.storage_order).reshape(-1)
        if not info.in_shard:
            assert info[1:] == (None, None, None, None)
            continue
        mine = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        assert torch.equal(mine, whole[info.intra_param_start_idx : info.intra_param_end_idx + 1])
    present = [item for item, info in zip(drawn, infos, strict=True) if info.in_shard]
    held = torch.cat([torch.empty(0, dtype=flat.dtype)] + [local[i[1] : i[1] + i[2]] for i in infos if i.in_shard])
    assert not held.isnan().any()
    assert held.numel() == int((~local.isnan()).sum())
    meta = shard_metadata(shards, rank)
    assert meta.param_names == tuple(item.spec.fqn for item in present)
    assert meta.param_shapes == tuple(tuple(item.value.shape) for item in present)
    assert meta.param_numels == tuple(item.value.numel() for item in present)
    assert meta.param_offsets == tuple((i[3], i[4]) for i in infos if i.in_shard)


def specs(*shapes):
    return [ParamSpec.of(f"p{i}", shape) for i, shape in enumerate(shapes)]


@pytest.mark.covers("FLAT-03", "FLAT-13")
def test_fp32_with_two_ranks():
    layout = FlatLayout.build(specs((7, 3), (5, 7), (5, 5)), alignment_numel=4, pad_to_multiple=2)
    assert numels_with_padding(layout) == (21, 3, 35, 1, 25, 1)
    assert is_padding_mask(layout) == (False, True, False, True, False, True)
    assert layout.numel == 86


@pytest.mark.covers("FLAT-04")
def test_alignment_counts_elements_of_the_compute_dtype():
    layout = FlatLayout.build(specs((5, 2), (5, 5), (3, 5)), alignment_numel=8, pad_to_multiple=2)
    assert numels_with_padding(layout) == (10, 6, 25, 7, 15, 1)
    assert layout.numel == 64


def test_no_parameters_make_an_empty_layout():
    layout = FlatLayout.build([], alignment_numel=4, pad_to_multiple=8)
    assert layout.numel == 0
    assert list(segments(layout)) == []


def test_empty_parameters_share_a_place_with_their_neighbour():
    layout = FlatLayout.build(specs((0,), (3,), (2, 0), (2,)))
    assert tuple(map(layout.span, range(4))) == (Span(0, 0), Span(0, 3), Span(3, 3), Span(3, 5))
    assert [index for index, *_ in layout.touched(Span(0, 5))] == [1, 3]


@pytest.mark.covers("FLAT-14")
def test_channels_last_keeps_its_element_order():
    weight = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    spec = ParamSpec.of("w", weight.shape, weight.stride())
    assert spec.stride == weight.stride()
    assert not spec.contiguous
    assert spec.storage_order == (0, 2, 3, 1)
    stored = torch.as_strided(weight, (weight.numel(),), (1,))
    assert torch.equal(weight.permute(spec.storage_order).reshape(-1), stored)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 3, 2)[..., 0]],
    ids=["strided", "expanded", "last-dim-selected"],
)
def test_elements_with_gaps_or_overlap_are_laid_out_row_major(tensor):
    spec = ParamSpec.of("w", tensor.shape, tensor.stride())
    assert not is_dense(tensor.shape, tensor.stride())
    assert spec.stride == row_major_stride(tensor.shape)
    assert spec.contiguous


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 1, 3), (4,)])
def test_order_agrees_with_torch(shape):
    tensor = torch.zeros(shape)
    spec = ParamSpec.of("w", tensor.shape, tensor.stride())
    assert spec.stride == tensor.stride()
    assert spec.contiguous == tensor.is_contiguous()
    assert is_row_major(shape, tensor.stride())
    assert spec.numel == tensor.numel()


def test_names_list_the_own_name_first():
    assert ParamSpec.of("a", (2,), aliases=["b", "c"]).names == ("a", "b", "c")


def one(numel: int) -> FlatLayout:
    return FlatLayout.build([ParamSpec.of("w", (numel,))])


@pytest.mark.covers("FLAT-06", "FLAT-07")
def test_forty_two_elements_on_eight_ranks_leave_the_last_rank_all_padding():
    shards = ShardMap(one(42), 8)
    assert shards.shard_numel == 6
    assert [shards.shard_span(rank).numel for rank in range(8)] == [6] * 7 + [0]
    assert [shards.padding(rank) for rank in range(8)] == [0] * 7 + [6]
    assert shards.param_spans(7) == ()
    assert shards.padded_numel == 48


@pytest.mark.covers("FLAT-06")
def test_fewer_elements_than_ranks():
    shards = ShardMap(one(2), 5)
    assert [shards.shard_span(rank) for rank in range(5)] == [Span(0, 1), Span(1, 2)] + [Span(2, 2)] * 3
    assert list(shards.owner_ranks(0)) == [0, 1]


def test_nothing_to_shard():
    shards = ShardMap(FlatLayout.build([ParamSpec.of("w", (0, 3))]), 4)
    assert shards.shard_numel == shards.padded_numel == 0
    assert list(shards.owner_ranks(0)) == []


@pytest.mark.covers("FLAT-20")
def test_a_world_of_one_holds_everything():
    shards = ShardMap(one(7), 1)
    assert shards.shard_span(0) == Span(0, 7)
    assert shards.padding(0) == 0


def test_one_rank_of_sixteen_thousand_costs_what_it_holds():
    layout = FlatLayout.build([ParamSpec.of(f"p{i}", (i % 7, 3)) for i in range(100_000)], alignment_numel=4)
    shards = ShardMap(layout, 16_384)
    tracemalloc.start()
    try:
        held = sum(len(shards.param_spans(rank)) for rank in range(0, 16_384, 64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 256 * (layout.numel // 16_384 + 2)
    assert peak < 2**20, "asking one rank must not build tables for all"
