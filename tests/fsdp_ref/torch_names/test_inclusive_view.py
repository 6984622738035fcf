"""FSDP1's inclusive tuples by example: the worked cases of its tests."""

from __future__ import annotations

import pytest

from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap
from fsdp_ref.torch_names.inclusive_view import ABSENT, ShardParamInfo, infos_between, shard_metadata, shard_param_infos


def layout(*numels, **options):
    return FlatLayout.build([ParamSpec.of(f"{2 * i}.weight", (n,)) for i, n in enumerate(numels)], **options)


@pytest.mark.covers("FLAT-10", "FLAT-12")
def test_the_two_halves_of_the_aligned_example():
    shards = ShardMap(layout(21, 35, 25, alignment_numel=4, pad_to_multiple=2), 2)
    assert shard_metadata(shards, 0).param_offsets == ((0, 20), (0, 18))
    assert shard_metadata(shards, 1).param_offsets == ((19, 34), (0, 24))
    assert shard_metadata(shards, 1).param_names == ("2.weight", "4.weight")
    assert shard_metadata(shards, 1).param_strides == ((1,), (1,))
    assert shard_metadata(shards, 1).param_contiguities == (True, True)
    assert shard_metadata(shards, 0)._fields == (
        "param_names",
        "param_shapes",
        "param_strides",
        "param_contiguities",
        "param_numels",
        "param_offsets",
    )


@pytest.mark.covers("FLAT-09")
def test_absent_parameters_are_false_and_four_nones():
    assert shard_param_infos(ShardMap(layout(4, 4), 2), 0) == (ShardParamInfo(True, 0, 4, 0, 3), ABSENT)
    assert ABSENT == (False, None, None, None, None)


@pytest.mark.covers("FLAT-11")
@pytest.mark.parametrize(
    ("start", "last", "offsets"),
    [
        (0, 0, [(0, 0), None, None]),
        (50, 149, [(50, 99), (0, 49), None]),
        (50, 199, [(50, 99), (0, 99), None]),
        (99, 199, [(99, 99), (0, 99), None]),
        (100, 199, [None, (0, 99), None]),
        (199, 299, [None, (99, 99), (0, 99)]),
        (100, 299, [None, (0, 99), (0, 99)]),
        (100, 1000, [None, (0, 99), (0, 99)]),
        (299, 299, [None, None, (99, 99)]),
        (300, 400, [None, None, None]),
        (7, 6, [None, None, None]),
    ],
)
def test_any_window_of_three_hundred_elements(start, last, offsets):
    infos = infos_between(layout(100, 100, 100), start, last)
    assert [(i[3], i[4]) if i.in_shard else None for i in infos] == offsets
