"""fsdp-verify train: a gradient that differs begins to differ in backward or after it, and the report says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch

SCRIPT = str(Path(__file__).parent / "with_backward.py")


def of(mistake: str):
    runner = Runner(Launch(SCRIPT, ("--mistake", mistake), steps=2, isolation="warm"), default_pool())
    return judged(runner, {1: runner.run(1)}, 3)


def test_the_right_script_passes():
    judgement = of("none")
    assert judgement.verdict is Verdict.PASS, judgement


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("own norm", r"begins to differ after backward, .* rank's own shard"),
        ("own part", r"begins to differ in backward: losses are those of one process"),
        ("own labels", r"^(?!.*begins to differ).*$"),
    ],
)
def test_where_a_gradient_begins_to_differ(mistake, message):
    judgement = of(mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence, re.DOTALL), judgement.sentence
