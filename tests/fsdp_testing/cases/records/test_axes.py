"""Every axis says all of itself: what is added to a case's plan is demanded, drawn, shrunk and told without another line."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from fuzz_cases import case

from fsdp_testing.cases.drawing.choices import SeededChoices
from fsdp_testing.cases.drawing.features import FEATURES, Swarm
from fsdp_testing.cases.records import AXES, CAPABILITIES, WrappingPlan
from fsdp_testing.cases.records.axes import Option

AHEAD = Option("backward_prefetch", "prefetch", ("pre", "post", "none"), feature="wrap.ahead")


def test_every_field_of_a_plan_is_told_by_an_axis():
    told = {name for axis in AXES for name in axis.setup(case())}
    elsewhere = {"policy", "meta_init"}  # `oracle/setup.py` makes functions of them
    assert {field.name for field in fields(WrappingPlan)} <= told | elsewhere


def test_features_and_needs_are_known():
    for axis in AXES:
        assert set(axis.features) <= set(FEATURES)
        assert set().union(*axis.features.values(), axis.needs(case())) <= set(CAPABILITIES)


def test_an_option_is_drawn_where_its_feature_is_on_and_becomes_plain_again():
    assert AHEAD.draw(case(), SeededChoices(0), Swarm(frozenset())) == case()
    drawn = AHEAD.draw(case(), SeededChoices(0), Swarm(frozenset({"wrap.ahead"})))
    value = drawn.wrapping.backward_prefetch
    assert value in ("post", "none")
    assert (list(AHEAD.needs(drawn)), list(AHEAD.tags(drawn))) == (["prefetch"], [f"backward_prefetch:{value}"])
    assert AHEAD.setup(drawn) == {"backward_prefetch": value}
    assert [simpler for _, simpler in AHEAD.simpler(drawn)] == [case()]
    assert not [*AHEAD.needs(case()), *AHEAD.simpler(case()), *AHEAD.tags(case())]


@pytest.mark.parametrize("value", [True, "late"])
def test_an_option_refuses_what_is_none_of_its_values(value):
    wrong = replace(case(), wrapping=WrappingPlan(backward_prefetch=value))
    assert list(AHEAD.problems(wrong)) == [
        f"wrapping.backward_prefetch: expected one of pre, post, none, got {value!r}"
    ]
