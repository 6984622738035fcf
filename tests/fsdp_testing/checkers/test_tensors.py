"""Comparing tensors: bounds per element, bits, and numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_testing.checkers.tensors import difference, same_bits


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


def test_a_nan_for_a_number_is_told_with_what_it_may_be_the_mark_of():
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert (
        difference(nan, one, 0.0).text
        == "nan for 1.0, which may be a collective's result read before it was waited for"
    )
    assert difference(one, nan, 0.0).text == "1.0 for nan"
    assert difference(torch.tensor([2.0]), one, 0.0).text == "2.0 for 1.0"
