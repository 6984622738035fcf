"""fsdp-verify train: ordinary loops that do more than forward and backward on a rank's own rows.

Forwards that no gradient comes back to take no rows of data; torch.func's transforms are looked into; each rank may load the
batch of all ranks and take its slice; models are called in compiled functions.
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
from fsdp_testing.train.steps import StepSeen
from fsdp_testing.train.whole import trained_rows

SCRIPT = str(Path(__file__).parent / "with_unused.py")


def of(*arguments: str):
    runner = Runner(Launch(SCRIPT, arguments, steps=3, isolation="warm"), default_pool())
    return judged(runner, {1: runner.run(1)}, 3)


@pytest.mark.parametrize("way", ["plays", "warms up", "by sample", "slices", "ensemble", "compiled", "compiled whole"])
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
        ("compiled", "summed", "exactly 3 times"),
        ("compiled whole", "one kept", "gradients of 1 of 4 parameters are not reduced, first that of 2.bias"),
        ("warms up", "one kept, clipped", "gradients of 1 of 4 parameters are not reduced, first that of 2.bias"),
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


def test_a_forward_is_idle_until_a_gradient_comes_back_or_another_is_given_its_output():
    weight, seen = torch.ones(3, requires_grad=True), Backpropagated()
    outputs = [weight * number for number in (1, 2, 3)]
    for number, output in enumerate(outputs[:2]):
        seen.watch(number, {"out": output})
    seen.watch(2, outputs[2].detach())  # what made it may have stepped already
    assert seen.idle() == {0, 1}
    outputs[1].sum().backward()
    assert seen.idle() == {0}
    seen.see_given([outputs[0].detach()])
    assert seen.idle() == frozenset()
    seen.watch(0, outputs[0])
    seen.end_step()
    assert seen.idle() == frozenset()


def test_rows_of_idle_forwards_do_not_count_unless_a_rank_had_none_left():
    def step(*idle):
        return StepSeen(rows=(("a",), ("b",), ("c",)), idle=frozenset(idle))

    assert trained_rows([step(0, 1), step(0, 1)]) == (("c",), ("c",))
    assert trained_rows([step(0, 1), step(1)]) == (("c",), ("a", "c")), (
        "a stage of a pipeline may have tried its backward"
    )
    assert trained_rows([step(0), step(0, 1, 2)]) == (("a", "b", "c"),) * 2
