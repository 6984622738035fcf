"""fsdp-verify train: scripts that go on with a new model, loaded from what they saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_new_models.py")


def of(mistake: str):
    return examine(Launch(SCRIPT, ("--mistake", mistake), steps=4), (3,)).judgements[-1]


def test_a_model_loaded_from_its_own_checkpoint_may_differ_by_roundings():
    assert of("").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("mistake", "verdict", "sentence"),
    [
        ("optimizer of rank 0", Verdict.FAIL, "their optimizers step differently"),
        ("one step earlier", Verdict.FAIL, "at step 1 .*exactly 3 times"),
        # It may have been drawn anew; but one process must not be given weights that the ranks computed.
        ("summed", Verdict.UNKNOWN, "The model is made during the training, and all steps before agree"),
    ],
)
def test_a_mistake_around_the_new_model_is_noticed(mistake, verdict, sentence):
    judgement = of(mistake)
    assert judgement.verdict is verdict, judgement
    assert re.search(sentence, judgement.sentence), judgement.sentence
