"""fsdp-verify train: ranks that make different numbers of steps under torch's Join."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_joins.py")


def of(steps: int):
    return examine(Launch(SCRIPT, steps=steps, isolation="warm", timeout=60.0), (2,)).judgements[-1]


def test_steps_in_which_all_ranks_have_rows_are_compared():
    assert of(2).verdict is Verdict.PASS


@pytest.mark.parametrize("steps", [3, 5])
def test_further_steps_give_no_verdict(steps):
    judgement = of(steps)
    assert (judgement.verdict, judgement.size) == (Verdict.UNKNOWN, 2), judgement
    assert "which torch's Join allows. Compare steps in which all have rows: --steps 2 at most" in judgement.sentence
