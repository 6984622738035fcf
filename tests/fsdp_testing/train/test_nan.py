"""fsdp-verify train: a script that computes NaN, and why it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_early_reads.py")


def of(mistake: str):
    report = examine(Launch(SCRIPT, ("--mistake", mistake), steps=3, isolation="warm"), (3,))
    return report.judgements[-1]


def test_a_script_that_waits_passes():
    assert of("").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("mistake", "size", "cause"),
    [
        ("no wait", 1, "the result of an asynchronous collective is read before its wait"),
        ("no wait on ranks", 3, "the result of an asynchronous collective is read before its wait"),
        ("no memory", 1, "uninitialised memory is read"),
    ],
)
def test_what_is_read_too_early_fails(mistake, size, cause):
    judgement = of(mistake)
    assert (judgement.verdict, judgement.size) == (Verdict.FAIL, size), judgement
    assert f"Cause: {cause}" in judgement.sentence


def test_a_script_that_diverges_is_unknown():
    judgement = of("diverges")
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert "Check it with fewer steps" in judgement.sentence
