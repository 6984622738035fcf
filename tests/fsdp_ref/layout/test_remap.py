"""Remapping by example: what is copied between worlds, and what cannot be."""

from __future__ import annotations

import pytest

from fsdp_ref.errors import LayoutError
from fsdp_ref.layout import Copy, FlatLayout, ParamSpec, Remap, ShardMap


def shards(world, *params, **options):
    return ShardMap(FlatLayout.build([ParamSpec.of(*param) for param in params], **options), world)


def test_two_ranks_to_three():
    plan = Remap(shards(2, ("w", (6,))), shards(3, ("w", (6,))))
    assert list(plan.receives(1)) == [Copy("w", 0, 2, 1, 0, 1), Copy("w", 1, 0, 1, 1, 1)]
    assert list(plan.sends(0)) == [Copy("w", 0, 0, 0, 0, 2), Copy("w", 0, 2, 1, 0, 1)]


def test_every_misfit_is_listed():
    source = shards(2, ("a", (2,)), ("b", (3,)), ("only_source", (1,)), ("c", (2, 3), (1, 2)))
    target = shards(2, ("a", (2, 1)), ("b", (3,)), ("only_target", (1,)), ("c", (2, 3)))
    with pytest.raises(LayoutError) as info:
        Remap(source, target)
    text = str(info.value)
    for fragment in ("a of shape (2,)", "c with strides (1, 2)", "only_target (source)", "only_source (target)"):
        assert fragment in text
    assert "b of shape" not in text


def test_partial_plans_leave_out_what_one_side_lacks():
    source = shards(2, ("a", (4,)), ("b", (4,)))
    target = shards(2, ("b", (4,)), ("c", (4,)))
    plan = Remap(source, target, partial=True)
    assert {copy.fqn for rank in range(2) for copy in plan.receives(rank)} == {"b"}
    assert {copy.fqn for rank in range(2) for copy in plan.sends(rank)} == {"b"}


def test_what_one_side_lacks_hides_nothing_behind_it():
    source, target = shards(1, ("a", (4,)), ("b", (4,))), shards(1, ("c", (4,)), ("b", (4,)))
    plan = Remap(source, target, partial=True)
    assert list(plan.receives(0)) == list(plan.sends(0)) == [Copy("b", 0, 4, 0, 4, 4)]


def test_the_way_back_leaves_out_the_same():
    back = Remap(shards(1, ("a", (4,)), ("b", (4,))), shards(2, ("b", (4,)), ("c", (4,))), partial=True).inverse()
    assert list(back.receives(0)) == [Copy("b", 0, 0, 0, 4, 4)]


def test_a_tied_parameter_is_found_under_any_of_its_names():
    source = ShardMap(FlatLayout.build([ParamSpec.of("head", (4,), aliases=["embed"])]), 2)
    target = ShardMap(FlatLayout.build([ParamSpec.of("embed", (4,))]), 4)
    assert sum(copy.numel for rank in range(4) for copy in Remap(source, target).receives(rank)) == 4


def test_a_tie_on_one_side_alone_is_refused():
    source = ShardMap(FlatLayout.build([ParamSpec.of("a", (4,), aliases=["b"])]), 2)
    with pytest.raises(LayoutError, match="two target parameters that are one in the source"):
        Remap(source, shards(2, ("a", (4,)), ("b", (4,))))


def test_remapping_at_scale_asks_only_about_the_rank():
    params = [(f"p{i}", (3, 7)) for i in range(20_000)]
    plan = Remap(shards(16_384, *params, alignment_numel=4), shards(10_000, *params))
    copies = list(plan.receives(9_999))
    assert 0 < len(copies) < 100
