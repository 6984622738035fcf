"""Comparing tensors: bounds per element, bits, and numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_testing.oracle import execute
from fsdp_testing.oracle.tensors import Difference, difference, same_bits


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_equal_numbers_satisfy_a_bound_of_zero():
    found = difference(t(1.0, -0.0), t(1.0, 0.0), 0.0)
    assert not found.exceeded
    assert found.error == 0.0
    assert found.ratio == 0.0


def test_one_ulp_exceeds_a_bound_of_zero():
    found = difference(torch.nextafter(t(1.0), t(2.0)), t(1.0), 0.0)
    assert found.exceeded
    assert 0 < found.error < 1e-15


def test_the_bound_is_admissible_and_what_lies_beyond_is_not():
    assert not difference(t(1.5), t(1.0), 0.5).exceeded
    assert difference(t(1.5), t(1.0), 0.499).exceeded


def test_bounds_may_differ_between_elements():
    found = difference(t(1.1, 2.0), t(1.0, 2.1), t(0.2, 0.05))
    assert found.exceeded
    assert found.position == 1
    assert found.bound == 0.05


def test_the_reported_element_is_the_worst_beyond_its_bound():
    found = difference(t(0.0, 10.0, 1.0), t(0.0, 5.0, 0.0), t(0.0, 6.0, 0.1))
    assert (found.position, found.actual, found.expected) == (2, 1.0, 0.0)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf), (math.inf, -math.inf), (math.nan, math.inf)],
)
def test_what_is_no_number_is_infinitely_far_from_a_number(actual, expected):
    found = difference(t(actual, 0.0), t(expected, 0.0), 1e9)
    assert found.exceeded
    assert found.error == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_equals_itself(value):
    assert not difference(t(value, 1.0), t(value, 1.0), 0.0).exceeded


def test_an_infinite_bound_admits_no_nan():
    assert difference(t(math.nan), t(1.0), math.inf).exceeded


def test_empty_tensors_are_equal():
    assert not difference(torch.empty(0), torch.empty(0), 0.0).exceeded


def test_the_ratio_tells_how_close_a_pass_was():
    assert difference(t(1.25), t(1.0), 1.0).ratio == 0.25


def test_bits_tell_what_numbers_do_not():
    assert same_bits(t(math.nan), t(math.nan))
    assert not same_bits(t(0.0), t(-0.0))
    assert not same_bits(t(1.0), t(1.0, dtype=torch.float32))
    assert not same_bits(t(1.0), t(1.0, 1.0))
    assert same_bits(torch.tensor([True]), torch.tensor([True]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_bits_of_every_dtype(dtype):
    one = torch.arange(4).to(dtype)
    other = one.clone()
    assert same_bits(one, other)
    other[2] += 1
    assert not same_bits(one, other)


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        (2.1182616302771327, 1.30583238447629, "got 2.118, expected 1.306"),
        (math.inf, 12.3512345, "got inf, expected 12.35"),
        (1.00000000000123, 1.0, "got 1.0000000000012, expected 1.0"),
        (0.1 + 0.2, 0.3, "got 0.30000000000000004, expected 0.3"),
        (-0.0, 0.0, "got -0.0, expected 0.0"),
    ],
)
def test_numbers_are_as_short_as_shows_how_far_they_are_apart(actual, expected, said):
    assert Difference(1.0, 0.0, 0, math.inf, exceeded=True, actual=actual, expected=expected).text.startswith(said)


@pytest.mark.parametrize(
    ("actual", "expected", "hint"),
    [
        (math.nan, 1.0, "; NaN may be a collective's result read before it was waited for"),
        (math.inf, 12.35, "; an infinity may be an overflow, or memory that was never written, added up"),
        (-math.inf, 0.0, "; an infinity may be an overflow, or memory that was never written, added up"),
        (-5.0e303, 0.5, "; numbers as large as this may be padding or a buffer that was never written"),
        (1.0, math.nan, ""),
        (1.0, math.inf, ""),
        (-5.0e303, 2.0e303, ""),
        (2.0, 1.0, ""),
    ],
)
def test_both_numbers_are_named_with_what_a_strange_one_may_be_the_mark_of(
    actual: float, expected: float, hint: str
) -> None:
    found = difference(t(actual), t(expected), 0.0)
    assert found.text.startswith(f"got {found.actual!r}, expected {found.expected!r}")
    assert found.text.removeprefix(f"got {found.actual!r}, expected {found.expected!r}") == hint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_unwritten_memory_of_a_judged_program_is_named_also_where_it_was_averaged(dtype: torch.dtype) -> None:
    fresh = torch.full((32,), execute._BYTE ^ 0xFF, dtype=torch.uint8).view(dtype)
    for world_size in (1, 2, 4):
        found = difference(fresh / world_size, t(*[1.0] * len(fresh)), 0.0)
        assert found.text.endswith("that was never written")
