"""fsdp-verify train: roundings of a policy of mixed precision hide no mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.low_precision import watched
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch

SCRIPT = str(Path(__file__).parent / "with_mixed_precision.py")

WAYS = ["fsdp1", "fsdp2", "wrapper", "composable", "hook", "casts"]


def of(*arguments: str):
    runner = Runner(Launch(SCRIPT, arguments, steps=2, isolation="warm"), default_pool())
    return judged(runner, {1: runner.run(1)}, 2)


@pytest.mark.parametrize("by", WAYS)
def test_a_mistake_that_roundings_hide_shows_in_full_precision(by):
    judgement = of("--by", by, "--mistake", "slightly")
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "This shows in float32" in judgement.sentence


@pytest.mark.parametrize("by", WAYS)
def test_a_right_script_passes_in_both(by):
    judgement = of("--by", by)
    assert judgement.verdict is Verdict.PASS, judgement
    assert any("compared in float32, too" in line for line in judgement.compared), judgement


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (
            "clearly",
            "Divide by the number of ranks. These numbers are of a run in float32;",
        ),
        ("in bfloat16", "In float32 both compute the same: look at what is cast"),
    ],
)
def test_a_mistake_that_low_precision_shows_is_looked_at_in_float32_too(mistake, sentence):
    judgement = of("--by", "casts", "--mistake", mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert sentence in judgement.sentence


def test_a_policy_is_seen_where_it_is_read_and_left_as_it_was():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    with watched(is_on=False) as asked:
        assert policy.output_dtype is torch.float64
        assert not asked
        assert policy.param_dtype is torch.float32
        assert asked
    with watched(is_on=True) as asked:
        assert policy.param_dtype is torch.bfloat16
        assert asked
    assert policy.param_dtype is torch.bfloat16
    assert "__getattribute__" not in vars(fsdp.MixedPrecisionPolicy)
