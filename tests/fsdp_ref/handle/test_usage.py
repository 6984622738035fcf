"""Marks of use: one for each parameter in each shard, found without looking at every rank."""

from __future__ import annotations

import random

import pytest
import torch

from fsdp_ref.handle.usage import UsageMarks
from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap

CPU = torch.device("cpu")


def shards_of(sizes, ranks, alignment=1):
    specs = [ParamSpec.of(f"p{index}", (size,)) for index, size in enumerate(sizes)]
    return ShardMap(FlatLayout.build(specs, alignment_numel=alignment), ranks)


def by_looking(shards):
    """Every first element of a parameter in a shard, by asking every rank."""
    return [
        (rank * shards.shard_numel + piece.offset_in_shard, piece.param_index)
        for rank in range(shards.world_size)
        for piece in shards.param_spans(rank)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_places_are_those_that_every_rank_would_say(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 2, 3, 7, 20]) for _ in range(draw.randint(1, 6))]
    shards = shards_of(sizes, draw.choice([1, 2, 3, 5, 8]), draw.choice([1, 2, 4]))
    wanted = by_looking(shards)
    for rank in range(shards.world_size):
        marks = UsageMarks(shards, rank, CPU)
        assert marks.owners == [owner for _, owner in wanted]
        flat = torch.ones(shards.padded_numel)
        marks.stamp(flat, [False] * len(sizes))
        assert [place for place, owner in wanted] == flat.signbit().nonzero().flatten().tolist()
        assert marks.unused(flat).all()
        mine = [piece.offset_in_shard for piece in shards.param_spans(rank)]
        part = torch.ones(shards.shard_numel)
        marks.stamp(part, [False] * len(sizes), shard=True)
        assert mine == part.signbit().nonzero().flatten().tolist()


def test_many_ranks_cost_one_look(monkeypatch):
    shards = shards_of([1000, 30_000, 5], 16_384)
    seen = []
    look = ShardMap.param_spans
    monkeypatch.setattr(ShardMap, "param_spans", lambda self, rank: seen.append(rank) or look(self, rank))
    marks = UsageMarks(shards, 3, CPU)
    assert seen == [3]
    assert len(marks.owners) > 15_000


def test_what_is_unused_may_change_from_step_to_step():
    shards = shards_of([3, 4], 2)
    marks = UsageMarks(shards, 0, CPU)
    for used in ([True, False], [True, False], [False, True], [True, True], [False, False]):
        flat = torch.ones(shards.padded_numel)
        marks.stamp(flat, used)
        signs = marks.unused(flat).tolist()
        assert signs == [not used[owner] for owner in marks.owners]
