"""fsdp-verify train: ordinary loops that do more than forward and backward on a rank's own rows.

Forwards that no gradient comes back to take no rows of data; torch.func's transforms are looked into; each rank may load the
batch of all ranks and take its slice.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.batches import Backpropagated
from fsdp_testing.train.check import judged
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch

SCRIPT = str(Path(__file__).parent / "with_unused.py")


def of(*arguments: str):
    runner = Runner(Launch(SCRIPT, arguments, steps=3, isolation="warm"), default_pool())
    return judged(runner, {1: runner.run(1)}, 3)


@pytest.mark.parametrize("way", ["plays", "warms up", "by sample", "slices", "ensemble"])
def test_a_right_script_passes(way):
    judgement = of("--way", way)
    assert judgement.verdict is Verdict.PASS, judgement
    assert "with the same rows at each step" in judgement.sentence


@pytest.mark.parametrize(
    ("way", "mistake", "message"),
    [
        ("plays", "same rows", "every rank trains on the same rows"),
        ("by sample", "same rows", "every rank trains on the same rows"),
        ("by sample", "divided by own", "3 times"),
        ("slices", "no slice", "every rank trains on the same rows"),
        ("slices with noise", "no slice", "120 of the rows that the ranks take were taken before"),
        ("ensemble", "summed", "exactly 3 times"),
    ],
)
def test_a_mistake_beside_them_is_named(way, mistake, message):
    judgement = of("--way", way, "--mistake", mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence), judgement.sentence


def test_slices_that_a_rank_changes_before_forward_are_unknown():
    judgement = of("--way", "slices with noise")
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert "mark the line where the script has its batch ready" in judgement.sentence


def test_forwards_without_a_gradient_have_no_rows():
    weight, rows = torch.ones(3, requires_grad=True), (("a",), ("b",), ("c",))
    seen = Backpropagated()
    outputs = [weight * number for number in (1, 2, 3)]
    for number, output in enumerate(outputs[:2]):
        seen.watch(number, {"out": output})
    seen.watch(2, outputs[2].detach())  # what made it may have stepped already
    assert seen.rows(rows) == ((), (), ("c",))
    assert seen.rows(rows[:2]) == rows[:2], "nothing came back to any"
    outputs[1].sum().backward()
    assert seen.rows(rows) == ((), ("b",), ("c",))
    seen.see_given([outputs[0].detach()])
    assert seen.rows(rows) == rows, "the first gave its output to another"
    seen.end_step()
    seen.watch(0, outputs[0])
    seen.end_step()
    assert seen.rows(rows) == rows
