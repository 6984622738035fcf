"""fsdp-verify train: rows that are drawn, padded, split or streamed accuse nobody; what cannot be replayed is unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_rows.py")


def judge(*arguments, steps=2):
    return examine(Launch(SCRIPT, arguments, steps=steps, isolation="warm"), (2,))


@pytest.mark.parametrize(
    ("arguments", "steps", "says"),
    [
        (("augmented", "--workers", "1"), 5, r"given the rows of all ranks \(the items of its DataLoader\)"),
        (("split",), 5, "not compared: how the ranks share the rows of a DataLoader"),
        (("own",), 2, "given the rows of all ranks"),
        (("scaled", "--marked"), 2, "the line marked with"),
        (("stream",), 5, "not compared: how the ranks share the rows of a DataLoader"),
        (("time first",), 2, "given the rows of all ranks"),
        (("time first", "--inside"), 2, "given the rows of all ranks"),
        (("transposed",), 2, "given the rows of all ranks"),
        (("transposed", "--inside"), 2, "given the rows of all ranks"),
        (
            ("in the loop", "--inside"),
            2,
            r"(?s)given the rows of all ranks \(the arguments of forward\).*what the script does with its rows between",
        ),
    ],
)
def test_right_rows_pass(arguments, steps, says):
    report = judge("--rows", *arguments, steps=steps)
    assert report.verdict is Verdict.PASS, str(report)
    assert re.search(says, str(report)), str(report)


@pytest.mark.parametrize(
    ("arguments", "steps", "says"),
    [
        (("augmented", "--workers", "1", "--mistake", "same order"), 5, "set_epoch is not called"),
        (("augmented", "--mistake", "twice"), 2, "divided by the number of ranks once too often"),
        (("padded", "--mistake", "twice"), 2, "divided by the number of ranks once too often"),
        (("time first", "--mistake", "summed"), 2, "gradients are summed over ranks"),
        (("time first", "--mistake", "unsynchronised"), 2, "differs between ranks 0 and 1"),
        (
            ("plain", "--mistake", "narrow"),
            2,
            "At step 0 the narrowest dtype .* is float32 on rank 0 and bfloat16 on rank 1",
        ),
        (("split", "--mistake", "twice"), 2, "divided by the number of ranks once too often"),
    ],
)
def test_wrong_twins_fail(arguments, steps, says):
    report = judge("--rows", *arguments, steps=steps)
    assert report.verdict is Verdict.FAIL, str(report)
    assert re.search(says, str(report)), str(report)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("in the loop",),
            r"but at step 0 it trains on other rows.* in the loop\) cannot be replayed, nor .*\. Mark",
        ),
        (
            ("fixed", "--marked"),
            "one process was given the rows of all ranks .*, and did not end well: .* Mark the line where",
        ),
        (("transposed", "--marked"), "the marked line has its rows along another dimension .* transpose after it"),
        (
            ("time first", "--mistake", "twice"),
            "it is not known whether one process got the same. Give it the rows first",
        ),
        (("masked",), r"forward draws random numbers, .* Draw them outside forward"),
        (("masked by its own",), r"forward draws random numbers, .* Draw them outside forward"),
        (("masked anew",), r"forward draws random numbers, .* Draw them outside forward"),
        (("masked by numpy anew",), r"forward draws random numbers, .* Draw them outside forward"),
        (("stream", "--mistake", "shifted"), "11 of the rows that the ranks take are taken by several of them"),
        (("scaled",), "shifted or scaled by other numbers: each rank's own statistic, .* If it is intended, mark"),
        (("padded",), r"differs from one process only where rows are padded to another length: .* Mask the padding"),
    ],
)
def test_what_cannot_be_replayed_or_depends_on_padding_is_unknown(arguments, says):
    report = judge("--rows", *arguments, steps=3)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert re.search(says, str(report)), str(report)


GAME = str(Path(__file__).parent / "with_games.py")


def test_rows_that_depend_on_weights_differ_by_roundings():
    report = examine(Launch(GAME, steps=6, isolation="warm"), (3,))
    assert report.verdict is Verdict.PASS, str(report)


def test_a_difference_before_rows_differ_fails():
    report = examine(Launch(GAME, ("summed",), steps=6, isolation="warm"), (2,))
    assert report.verdict is Verdict.FAIL, str(report)
    assert "gradients are summed over ranks, not averaged. At step 1" in str(report)
