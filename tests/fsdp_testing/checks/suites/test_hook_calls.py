"""Calls of a communication hook are counted and weighed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, WorldSpec, WrappingPlan
from fsdp_testing.checks.suites.hooks import HookCall, wrong_calls

PROGRAM = (ForwardBackward(Batch(0), no_sync=True), ForwardBackward(Batch(1)))


def case(strategy="full_shard"):
    plan = WrappingPlan(("layers.0",))
    return Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM, wrapping=plan, strategy=strategy)


@pytest.fixture(autouse=True)
def _own_gradients(monkeypatch):
    monkeypatch.setattr("fsdp_testing.checks.suites.hooks._own_gradients", lambda _case, _rank: ({1: 7.0}, 14))


RIGHT = (HookCall(1, 8, "float64", 3.0, 4), HookCall(1, 6, "float64", 4.0, 3))


def first_remark(case, calls):
    return next(wrong_calls(case, 0, calls), None)


def test_right_calls_are_right():
    assert first_remark(case(), RIGHT) is None
    plain = tuple(replace(call, output=-1) for call in RIGHT)
    assert first_remark(case("no_shard"), plain) is None


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (RIGHT[:1], "called 1 times, expected 2"),
        ((*RIGHT, replace(RIGHT[0], operation=0)), "called 1 times, expected 0"),
        ((RIGHT[0], replace(RIGHT[1], squares=4.001)), "squares add up to 7.001, expected 7"),
        ((RIGHT[0], replace(RIGHT[1], squares=float("nan"))), "squares add up to nan, expected 7"),
        ((RIGHT[0], replace(RIGHT[1], dtype="float32")), "was given float32, expected float64"),
        ((RIGHT[0], replace(RIGHT[1], output=2)), "6 elements and an output of 2 for 2 ranks"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(calls, said):
    remark = first_remark(case(), calls)
    assert remark is not None
    assert said in remark.statement


def test_an_output_without_shards_is_wrong():
    remark = first_remark(case("no_shard"), RIGHT)
    assert remark is not None
    assert "although nothing is sharded" in remark.statement
