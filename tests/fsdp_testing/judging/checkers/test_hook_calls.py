"""Calls of a communication hook are counted and weighed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, RankObservation, WorldSpec
from fsdp_testing.judging.checkers.hook_calls import HookCall, HookedObservation, check_calls

PROGRAM = (ForwardBackward(Batch(0), no_sync=True), ForwardBackward(Batch(1)))
RIGHT = (HookCall(1, 8, "float64", 3.0, 4), HookCall(1, 6, "float64", 4.0, 3))


def case(strategy="full_shard"):
    return Case(ModelSpec("mlp"), WorldSpec(2), PROGRAM, strategy=strategy)


def seen(*calls, expected=7.0):
    return [HookedObservation(rank, calls=calls, expected_squares={1: expected}, elements=14) for rank in range(2)]


def test_right_calls_are_right():
    assert check_calls(case(), seen(*RIGHT), 2, "float64") is None
    plain = tuple(replace(call, output=-1) for call in RIGHT)
    assert check_calls(case("no_shard"), seen(*plain), 2, "float64") is None


def test_a_rank_that_recorded_nothing_says_nothing():
    assert check_calls(case(), [RankObservation(0)], 2, "float64") is None


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
    found = check_calls(case(), seen(*calls), 2, "float64")
    assert found is not None
    assert said in found.explanation
    assert "on rank 0" in found.explanation


def test_an_output_without_shards_is_wrong():
    found = check_calls(case("no_shard"), seen(*RIGHT), 2, "float64")
    assert found is not None
    assert "although nothing is sharded" in found.explanation
