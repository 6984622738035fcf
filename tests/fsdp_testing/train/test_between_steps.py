"""fsdp-verify train: ranks that step their own gradients, and average weights afterwards or reduce inside the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.between_steps import OF_EACH_STEP, REMARK, of_own_gradients
from fsdp_testing.train.quantities import Kind
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_averaged_weights.py")


def of(*arguments: str):
    return examine(Launch(SCRIPT, arguments, steps=3, isolation="warm"), (3,)).judgements[-1]


def test_weights_averaged_after_each_step_of_sgd_are_those_of_one_process():
    judgement = of()
    assert judgement.verdict is Verdict.PASS, judgement
    assert REMARK in judgement.compared


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("--optimizer", "Adam"), "parameter 0.weight at step 0"),
        (("--period", "2"), "parameter 0.weight differs between ranks 0 and 1 at step 0"),
        (("--period", "2", "--mistake", "outer"), "parameter 0.weight differs between ranks 0 and 1 at step 0"),
    ],
)
def test_other_averages_differ_by_design(arguments, place):
    judgement = of(*arguments)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert place in judgement.sentence
    assert OF_EACH_STEP in judgement.sentence


def test_how_far_ranks_are_apart_before_the_average_hides_nothing():
    judgement = of("--mistake", "slightly")
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "parameter 0.weight at step 0" in judgement.sentence


@pytest.mark.parametrize("mistake", ["broadcast", "summed"])
def test_weights_of_one_rank_and_sums_are_no_average(mistake):
    judgement = of("--mistake", mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "averaged" not in judgement.sentence


def test_ranks_with_gradients_of_their_own_and_equal_weights_reduce_inside_the_step():
    judgement = of("--optimizer", "ByHand")
    assert judgement.verdict is Verdict.PASS, judgement
    judgement = of("--optimizer", "ByHand", "--mistake", "own moments")
    assert judgement.verdict is Verdict.FAIL, judgement
    assert of_own_gradients({Kind.GRADIENT}) in judgement.sentence
    assert of_own_gradients({Kind.GRADIENT, Kind.PARAMETER}) == of_own_gradients(set()) == ""


def test_elements_that_no_rank_steps_are_no_fault_of_the_reduction():
    script = str(Path(__file__).parent / "with_flat_shards.py")
    right, wrong = (
        examine(Launch(script, arguments, steps=3, isolation="warm"), (3,)).judgements[-1]
        for arguments in ((), ("--without-rest",))
    )
    assert right.verdict is Verdict.PASS, right
    assert wrong.verdict is Verdict.FAIL, wrong
    assert "parameter 2.weight at step 0" in wrong.sentence and "element 6" in wrong.sentence
    assert of_own_gradients({Kind.GRADIENT}) in wrong.sentence


@pytest.mark.parametrize("marked", [(), ("--marked",)])
def test_a_batch_that_one_rank_skips_is_named(marked):
    script = str(Path(__file__).parent / "with_skipped_batches.py")
    judgement = examine(Launch(script, marked, steps=2, isolation="warm"), (2,)).judgements[-1]
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert "by step 0 ranks have taken different numbers of batches (1, 2, in the order of ranks)" in judgement.sentence
    together = examine(Launch(script, (*marked, "--together"), steps=2, isolation="warm"), (2,)).judgements[-1]
    assert together.verdict is Verdict.PASS, together
