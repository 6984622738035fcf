"""fsdp-verify train: a step is judged by its own size, however small it is beside the weights; a step of nothing is no pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch

SCRIPT = str(Path(__file__).parent / "with_small_steps.py")


def judge(*arguments, size=2):
    runner = Runner(Launch(SCRIPT, arguments, steps=8, isolation="warm"), default_pool())
    return judged(runner, {1: runner.run(1)}, size)


@pytest.mark.parametrize("arguments", [("--lr", "1e-6"), ("--lr", "1e-3", "--decay", "5e-6")])
def test_a_right_script_passes(arguments):
    judgement = judge(*arguments)
    assert judgement.verdict is Verdict.PASS, judgement
    assert "learning rate" in judgement.compared[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mistake", "rate"), r"learning rate at step 0 .*multiplied by the number of ranks"),
        (("--mistake", "decay", "--lr", "1e-3", "--decay", "5e-6"), r"at step \d .*weights that are decayed twice"),
    ],
)
def test_what_ranks_multiply_fails(arguments, message):
    judgement = judge(*arguments)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence), judgement.sentence


def test_a_sum_of_gradients_with_a_rate_that_is_divided_passes_and_is_told():
    judgement = judge("--optimizer", "SGD", "--lr", "1e-3")
    assert judgement.verdict is Verdict.PASS, judgement
    assert any("gradients are 2 times, and learning rates 0.5 times" in line for line in judgement.compared), judgement


def test_a_rate_of_zero_trains_nothing():
    judgement = judge("--lr", "0")
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert "no parameter that changes" in judgement.sentence
