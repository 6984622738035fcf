"""What holds for every layout? Drawn shapes, orders, ties, alignments and worlds; no process is started.

The second half of each comparison is written from the definition and shares no code with the package: a list of
owners, one entry per element of the flat buffer, cut by plain loops; or a real flat tensor cut by ``torch.chunk``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap, Span
from fsdp_ref.torch_names.inclusive_view import is_padding_mask, numels_with_padding, shard_metadata, shard_param_infos

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
    for span, item in zip(layout.spans, drawn, strict=True):
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
    for index, span in enumerate(layout.spans):
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
    for span, item in zip(layout.spans, drawn, strict=True):
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


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_span_contains_its_elements(a, la):
    one = Span(a, a + la)
    assert {k for k in range(30) if k in one} == set(range(a, a + la))
