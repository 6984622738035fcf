"""Shards by example: short ranks, empty ranks, refused ranks, and the cost of one rank among many."""

from __future__ import annotations

import tracemalloc

import pytest

from fsdp_ref.errors import LayoutError
from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap, Span


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


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_is_refused(rank):
    shards = ShardMap(one(7), 4)
    for ask in (shards.shard_span, shards.padding, shards.param_spans):
        with pytest.raises(LayoutError, match=rf"a rank in \[0, 4\), got {rank}"):
            ask(rank)


def test_a_group_without_ranks_and_a_position_outside_are_refused():
    with pytest.raises(LayoutError, match="at least 1, got 0"):
        ShardMap(one(7), 0)
    with pytest.raises(LayoutError, match="got 7"):
        ShardMap(one(7), 2).owner_at(7)


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
