"""What a script makes in Python of a number that it took: followed in its source, by names and by factors."""

from __future__ import annotations

import sys

import pytest

from fsdp_testing.train.arithmetic import carried

size, rows, made = 2, [1, 2, 3, 4], []


def get_world_size():
    return size


def take(value=12.0):
    made.append(carried(sys._getframe(1), value))
    return value


class Meter:
    total = 0.0

    def add(self):
        self.total += take()

    def mean(self):
        return self.total / len(rows)


def mean_over_ranks():
    return take()


def no_factor():
    print(take(), file=sys.stderr)


def in_the_expression():
    return round(take() / size, 3)


def by_a_call():
    return f"{100 * take() / get_world_size():.3f}"


def by_its_name():
    value = take()
    return value / (size * len(rows))


def in_place():
    value = take()
    value /= size
    return value


def of_an_attribute():
    Meter().add()


def of_what_a_function_returns():
    value = mean_over_ranks()
    return value / size


def by_the_name_that_it_had():
    value = size
    for _ in range(1):
        value = take(value / size + 11.0)
        made.append(value)
    return made.pop()


def after_another_value():
    value = take()
    made.append(value)
    value = 3.0
    made.append(value / size)
    return made.pop(), made.pop()


def by_its_name_again():
    value = take()
    value = value / size
    return value * len(rows)


def by_what_a_call_gives():
    return take() / rows.pop(0)


def a_divisor():
    return size / take()


class Weight:
    grad = 4.0


def a_divisor_of_what_is_scaled_elsewhere():
    weight = Weight()
    weight.grad /= size
    value = take()
    weight.grad *= 0.7 / value


def a_factor_of_what_is_scaled_elsewhere():
    weight = Weight()
    weight.grad /= size
    weight.grad *= take()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (no_factor, 12.0),
        (in_the_expression, 6.0),
        (by_a_call, 600.0),
        (by_its_name, 1.5),
        (in_place, 6.0),
        (of_an_attribute, 3.0),
        (of_what_a_function_returns, 6.0),
        (by_the_name_that_it_had, 12.0),
        (after_another_value, 12.0),
        (by_its_name_again, 24.0),
        (by_what_a_call_gives, None),
        (a_divisor, 12.0),
        (a_divisor_of_what_is_scaled_elsewhere, 12.0),
        (a_factor_of_what_is_scaled_elsewhere, 12.0),
    ],
)
def test_a_number_is_followed_by_its_factors(code, expected):
    made.clear()
    code()
    assert made == [expected]
