"""Offsets by example: the worked cases of FSDP1's documentation, and layouts that disprove themselves."""

from __future__ import annotations

import tracemalloc

import pytest

from fsdp_ref.errors import LayoutError
from fsdp_ref.layout import FlatLayout, ParamSpec, Span
from fsdp_ref.torch_names.inclusive_view import is_padding_mask, numels_with_padding, segments


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


@pytest.mark.covers("FLAT-02")
def test_without_original_parameters_there_is_no_padding():
    layout = FlatLayout.build(specs((7, 3), (5, 7), (5, 5)))
    assert not any(is_padding_mask(layout))
    assert layout.numel == 21 + 35 + 25


def test_no_parameters_make_an_empty_layout():
    layout = FlatLayout.build([], alignment_numel=4, pad_to_multiple=8)
    assert layout.numel == 0
    assert list(segments(layout)) == []


def test_empty_parameters_share_a_place_with_their_neighbour():
    layout = FlatLayout.build(specs((0,), (3,), (2, 0), (2,)))
    assert layout.spans == (Span(0, 0), Span(0, 3), Span(3, 3), Span(3, 5))
    assert [index for index, *_ in layout.touched(Span(0, 5))] == [1, 3]


@pytest.mark.parametrize(("alignment", "multiple"), [(0, 1), (1, 0), (-4, -2)])
def test_units_below_one_are_refused_together(alignment, multiple):
    with pytest.raises(LayoutError, match="units of at least 1") as info:
        FlatLayout.build(specs((2,)), alignment_numel=alignment, pad_to_multiple=multiple)
    assert ("alignment_numel" in str(info.value)) == (alignment < 1)
    assert ("pad_to_multiple" in str(info.value)) == (multiple < 1)


def test_a_name_given_twice_is_refused_aliases_included():
    with pytest.raises(LayoutError, match="name 'a' given 2 times"):
        FlatLayout.build([ParamSpec.of("a", (2,)), ParamSpec.of("b", (2,), aliases=["a"])])


@pytest.mark.parametrize(
    ("starts", "numel", "fragment"),
    [
        ((0, 3), 5, "'p1' at 3"),  # misaligned
        ((0, 2), 4, "'p1' at 2"),  # overlapping
        ((0, 8), 10, "'p1' at 8"),  # a gap wider than one unit
        ((0, 4), 7, "total 7"),  # a tail that is not minimal
        ((0, 4), 5, "total 5"),  # too short
        ((0,), 3, "1 offsets for 2 parameters"),
    ],
)
def test_a_layout_that_is_wrong_disproves_itself(starts, numel, fragment):
    with pytest.raises(LayoutError, match=fragment):
        FlatLayout(tuple(specs((3,), (2,))), starts, numel, alignment_numel=4, pad_to_multiple=2)


def test_a_hundred_thousand_parameters_are_laid_out_without_a_quadratic_step():
    many = [ParamSpec.of(f"layer{i}.weight", (3, i % 5)) for i in range(100_000)]
    tracemalloc.start()
    try:
        layout = FlatLayout.build(many, alignment_numel=4, pad_to_multiple=16_384)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(layout) == 100_000
    assert peak < 64 * 2**20
