"""Whether two tensors share bytes, compared with the bytes themselves."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_testing.ranks.streams import regions
from fsdp_testing.ranks.streams.regions import Region


@st.composite
def drawn_regions(draw: st.DrawFn) -> Region:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    itemsize = draw(st.sampled_from((1, 2, 8)))
    strides = tuple(draw(st.integers(0, 12)) * itemsize for _ in shape)
    return Region(draw(st.integers(0, 10)) * itemsize, shape, strides, itemsize)


def bytes_of(region: Region) -> set[int]:
    steps = product(*(range(size) for size in region.shape))
    starts = (
        region.offset_bytes + sum(i * s for i, s in zip(step, region.strides_bytes, strict=True)) for step in steps
    )
    return {start + byte for start in starts for byte in range(region.itemsize_bytes)}


@given(drawn_regions())
def test_runs_are_the_bytes_of_the_region(region):
    assert {byte for start, end in region.runs() for byte in range(start, end)} == bytes_of(region)
    assert max(bytes_of(region)) + 1 == region.end_bytes


@given(drawn_regions(), drawn_regions())
def test_regions_overlap_where_they_share_a_byte(first, second):
    assert first.overlaps(second) is bool(bytes_of(first) & bytes_of(second))
    assert second.overlaps(first) is first.overlaps(second)


def test_columns_of_a_matrix_do_not_overlap():
    columns = [Region(8 * column, (1000, 1), (80, 8), 8) for column in range(10)]
    assert not any(a.overlaps(b) for a in columns for b in columns if a is not b)


@pytest.mark.parametrize("count", [regions.MAX_RUNS, regions.MAX_RUNS + 1])
def test_a_region_of_very_many_runs_counts_as_its_span(count):
    odd, even = Region(8, (count,), (16,), 8), Region(0, (count,), (16,), 8)
    assert odd.overlaps(even) is (count > regions.MAX_RUNS)
