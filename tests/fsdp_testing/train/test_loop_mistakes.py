"""The examples of training scripts pass, and mistakes planted into them are named: those that no other test has.

All of them are run by `ci/loop_mistakes.py`, several times.
"""

from __future__ import annotations

import loop_mistakes
import pytest

from fsdp_testing.cases.records import Verdict

RIGHT = {case.name: case for case in loop_mistakes.right_scripts() if case.name not in loop_mistakes.PACKAGES}
MISTAKES = {case.name: case for case in loop_mistakes.mistakes()}


def test_every_edit_still_fits_its_script():
    assert len(MISTAKES) > 20
    for case in MISTAKES.values():
        compile(case.text, case.name, "exec")


@pytest.mark.parametrize(
    "name", ["fsdp1_classifier.py", "padded_tokens.py", "average_checkpoints.py", "frozen_batch_norm.py"]
)
def test_a_right_example_passes(name):
    result = loop_mistakes.run(RIGHT[name])
    assert result.verdict == Verdict.PASS.value, result.said


@pytest.mark.parametrize(
    "name",
    [
        "FSDP1's gradients are clipped by torch's function, not by the model's",
        "layers are sharded and the root is not",
        "FSDP2 synchronises in the first micro-batch, not in the last",  # wrong on one rank alike: no comparison shows it
        "gradients are summed over ranks and not divided",  # behind a clip
        "a rank skips a step by its own loss",
        "the loss is divided by the rank's own count of tokens",
    ],
)
def test_a_planted_mistake_is_named(name):
    result = loop_mistakes.run(MISTAKES[name])
    assert loop_mistakes.is_named(MISTAKES[name], result), f"{result.verdict}: {result.said}"
