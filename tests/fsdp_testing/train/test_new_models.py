"""fsdp-verify train: weights that are set during the training: of a model that is loaded, and by the first rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.reading import Reader
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_new_models.py")


FIRST_ROWS = str(Path(__file__).parent / "with_first_rows.py")


def of(mistake: str, script: str = SCRIPT):
    return examine(Launch(script, ("--mistake", mistake), steps=4), (3,)).judgements[-1]


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


def test_weights_made_of_the_first_rows_may_differ_by_roundings():
    assert of("", FIRST_ROWS).verdict is Verdict.PASS


def test_weights_made_of_the_first_rows_of_one_rank_fail():
    judgement = of("rank 0", FIRST_ROWS)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(
        r"holds other weights than one process .* parameter 1.scale .*after the first forward began", judgement.sentence
    )


def test_a_part_of_a_known_model_is_no_model_of_its_own():
    reader, inner = Reader(), nn.Linear(2, 2)
    whole = nn.Sequential(inner)
    assert reader.add(whole)
    assert not reader.add(inner)
    assert reader.models == [whole]
