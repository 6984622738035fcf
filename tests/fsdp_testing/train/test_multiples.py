"""fsdp-verify train: a cause is named by the multiple that numbers of a step are of what is due, and by nothing less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.multiples import multiple_of, weights_of
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch

SCRIPT = str(Path(__file__).parent / "with_multiples.py")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("layer", r"gradient of 2.weight is 2 times the right values"),
        (
            "lost",
            r"the gradient of 2.bias and the optimizer's settings are those of one process, and step 0 does not change it",
        ),
        ("twice as far", r"step 0 changes it 2 times as much as in one process"),
        (
            "kept",
            r"all ranks have the same weights and the same gradient of 2.bias before step 0.*rank\(s\) 1 do not change it",
        ),
        (
            "scaled by rank",
            r"Cause: ranks scale their losses: rank 0 by 1, rank 1 by 2, expected 1, 1",
        ),
        ("rank 1 lost", r"Cause: ranks scale their losses: rank 0 by 1, rank 1 by (-?0|.*e-\d+), expected 1, 1"),
        ("own count", r"divided by the rank's own count .*weights the ranks' gradients by 0.5\d+, 0.4\d+, and"),
        (
            "own count beside zeros",
            r"divided by the rank's own count .* of rank\(s\) 0, the only ones that are not zero, by",
        ),
        ("own norm", r"each rank's own statistic, by design or by mistake.*outside of the model's forward"),
        # By the count of all ranks, as is right, beside a statistic of its own: the weights are no cause.
        ("own norm by count", r"each rank's own statistic, by design or by mistake.*outside of the model's forward"),
    ],
)
def test_a_multiple_names_its_cause(mistake, message):
    judgement = of(mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence), judgement.sentence


@pytest.mark.parametrize("mistake", ["noise", "noise later"])
def test_what_is_no_multiple_names_none(mistake):
    judgement = of(mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "Cause: " not in judgement.sentence, judgement.sentence


def test_the_table_says_that_the_rows_of_each_rank_in_turn_give_the_same():
    assert any(
        line.endswith("one process that gets the rows of each rank in turn, at step 0: the same")
        for line in of("own norm").table
    )


def of(mistake):
    launch = Launch(SCRIPT, ("--mistake", mistake), steps=2, isolation="warm")
    runner = Runner(launch, default_pool())
    return judged(runner, {1: runner.run(1)}, 2)


def test_multiples():
    due = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    assert multiple_of(due, due, 0.0).same
    assert multiple_of(2 * due, due, 0.0).times == 2.0
    assert not multiple_of(2 * due, due, 0.0).same
    assert multiple_of(due + 1, due, 1e-9).times is None
    assert multiple_of(due, torch.zeros(3), 1e-9).times is None
    assert multiple_of(torch.zeros(3), due, 1e-9).times == 0.0


def test_weights_of_parts():
    parts = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])]
    assert weights_of(torch.tensor([2.0, 3.0, 7.0]), parts, 1e-9) == pytest.approx([2.0, 3.0])
    assert weights_of(torch.tensor([2.0, 3.0, 8.0]), parts, 1e-9) is None
    assert weights_of(torch.tensor([2.0, 3.0, 8.0]), [], 1e-9) is None
    assert weights_of(torch.tensor([2.0, 0.0, 4.0]), [parts[0], 2 * parts[0]], 1e-9) is None
    assert weights_of(torch.tensor([2.0, 0.0, float("inf")]), parts, 1e-9) is None


GROUPS = str(Path(__file__).parent / "with_groups.py")


def test_groups_chosen_by_the_shape_of_shards_are_named():
    def of(*arguments):
        runner = Runner(Launch(GROUPS, arguments, steps=2, isolation="warm"), default_pool())
        return judged(runner, {1: runner.run(1)}, 2)

    assert of().verdict is Verdict.PASS
    judgement = of("--late")
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "the optimizer's groups hold other parameters than in one process: 0, 100 % of all" in judgement.sentence
    judgement = of("--names")
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "another number of groups of parameters than in one process. Wrappers change names" in judgement.sentence
