"""fsdp-verify train: a script that cuts batches into micro-batches of fixed size makes more from the rows of all ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_micro_batches.py")


def judge(*arguments, sizes=(2,)):
    return examine(Launch(SCRIPT, arguments, steps=3, isolation="warm"), sizes)


@pytest.mark.parametrize("divide", ["loss", "gradients"])
def test_a_constant_number_of_micro_batches_counts_as_a_rank_makes_them(divide):
    report = judge("--divide", divide, sizes=(2, 3))
    assert report.verdict is Verdict.PASS, str(report)
    assert "makes 4 micro-batches where a rank makes 2 and divides by 2" in str(report)
    assert "makes 6 micro-batches where a rank makes 2" in str(report)
    assert "one process may add up more micro-batches" in str(report)


def test_micro_batches_with_one_backward_count_as_a_rank_makes_them():
    report = judge("--one-backward")
    assert report.verdict is Verdict.PASS, str(report)
    assert "makes 4 micro-batches where a rank makes 2 and divides by 2" in str(report)


def test_losses_that_are_divided_by_the_true_number_are_compared_as_they_are():
    report = judge("--divide", "length")
    assert report.verdict is Verdict.PASS, str(report)
    assert "micro-batches where" not in str(report)


def test_sums_over_rows_that_are_divided_by_a_constant_batch_size_count_as_a_rank_takes_them():
    report = judge("--whole", "--divide", "rows", sizes=(2, 3))
    assert report.verdict is Verdict.PASS, str(report)
    assert (
        "It divides sums over its rows by 4, a constant of a rank's batch, so each of its losses was divided by 3"
        in str(report)
    )
    report = judge("--whole", "--divide", "length")
    assert report.verdict is Verdict.PASS, str(report)
    assert "sums over its rows" not in str(report)


def test_batches_of_a_budget_that_ranks_take_in_turn_count_as_those_of_one_process():
    report = judge("--whole", "--divide", "budget", sizes=(2, 3))
    assert report.verdict is Verdict.PASS, str(report)
    assert "It divides sums over its rows by 12, a constant of a rank's batch" in str(report)


def test_ranks_that_add_up_gradients_of_sums_are_one_process_as_it_is():
    report = judge("--whole", "--divide", "budget", "--sums")
    assert report.verdict is Verdict.PASS, str(report)
    assert "a constant of a rank's batch" not in str(report)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--whole", "--divide", "budget", "--mistake", "world size"), "1/4 of the right values"),
        (("--whole", "--divide", "never"), "gradients are divided by the number of ranks once too often"),
        (("--whole", "--divide", "rows", "--mistake", "world size"), "1/4 of the right values"),
        (
            ("--whole", "--divide", "length", "--mistake", "world size"),
            "gradients are divided by the number of ranks once too",
        ),
        (("--divide", "never"), "the loss is not divided by the number of accumulation steps"),
        (("--mistake", "world size"), "gradients are divided by the number of ranks once too often"),
        (("--mistake", "world size", "--divide", "length"), r"losses at step 0 are 0\.5 times those of one process"),
        (("--mistake", "layer"), "gradient of 2.weight is 2 times the right values"),
        (("--mistake", "layer", "--one-backward"), "gradient of 2.weight is 2 times the right values"),
        (("--mistake", "world size", "--one-backward"), "gradients are divided by the number of ranks once too often"),
        (("--mistake", "layer", "--divide", "length"), "gradient of 2.weight is 2 times the right values"),
        (("--mistake", "no_sync"), "the no_sync boundary is off by one"),
    ],
)
def test_mistakes_fail_by_their_own_cause(arguments, says):
    report = judge(*arguments)
    assert report.verdict is Verdict.FAIL, str(report)
    assert says in str(report) or re.search(says, str(report)), str(report)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "3"), "makes 3 micro-batches where a rank makes 2 and divides by 2. Mark the line"),
        (("--slices",), "at step 0 it trains on 4 rows where the ranks train on 8: the script takes a fixed number"),
    ],
)
def test_what_one_process_cannot_cut_alike_is_unknown(arguments, says):
    report = judge(*arguments)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert says in str(report)
