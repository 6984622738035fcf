"""fsdp-verify train --streams: a missing wait fails though all numbers are right; who has no stream is told that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = Path(__file__).parent / "with_streams.py"


def judge(how):
    """The verdicts on the numbers and on the streams, and all that is said."""
    report = examine(Launch(str(SCRIPT), (how,), steps=2, isolation="warm", streams=True), (2,))
    numbers, streams = report.judgements
    assert (numbers.relation, streams.relation) == ("", "--streams")
    return numbers.verdict, streams.verdict, str(report)


def line_of(text):
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("how", ["waits", "fsdp2"])
def test_a_script_that_waits_passes(how):
    numbers, streams, said = judge(how)
    assert (numbers, streams) == (Verdict.PASS, Verdict.PASS), said
    assert re.search(r"--streams on 2 ranks: pass: \d+ pieces of work on the default stream, stream \d", said), said


@pytest.mark.parametrize(
    ("how", "first", "then"),
    [
        ("steps before reduced", "parameter.grad.div_(size)", "optimizer.step()"),
        ("reduces before computed", "backward()", "dist.all_reduce(parameter.grad)"),
    ],
)
def test_a_missing_wait_fails_with_both_places(how, first, then):
    numbers, streams, said = judge(how)
    assert (numbers, streams) == (Verdict.PASS, Verdict.FAIL), said
    assert re.search(r"--streams on 2 ranks: FAIL: rank 0 has \d+ races on its streams, first: nothing orders", said), (
        said
    )
    for text in (first, then):
        assert f"with_streams.py:{line_of(text)} in <module>" in said


def test_a_script_without_streams_is_not_said_to_be_right():
    numbers, streams, said = judge("ddp")
    assert (numbers, streams) == (Verdict.PASS, Verdict.UNKNOWN), said
    assert "uses the default stream alone, so there was nothing to check" in said


def test_what_ends_only_unrecorded_is_unknown():
    numbers, streams, said = judge("raises when recorded")
    assert (numbers, streams) == (Verdict.PASS, Verdict.UNKNOWN), said
    assert "does not finish while its streams are recorded" in said
    assert "an operator that nobody can record" in said
