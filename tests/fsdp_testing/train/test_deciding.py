"""fsdp-verify train: what a script keeps, reduces and logs beside its weights is compared too, and its losses are read right.

One process does the same whatever the mistake, so that it runs once for all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.pair import Pair
from fsdp_testing.train.readings import suspects
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch
from fsdp_testing.train.surroundings import NumbersTaken

SCRIPT = str(Path(__file__).parent / "with_extras.py")


@pytest.fixture(scope="module")
def judge():
    alone = {}

    def judge(*arguments, size=2, inert=True):
        """Judge the script; `inert` arguments change nothing in one process."""
        launch = Launch(SCRIPT, tuple(arguments), steps=2, isolation="warm")
        known = () if inert else arguments
        if known not in alone:
            alone[known] = Runner(replace(launch, arguments=known), default_pool()).run(1)
        return judged(Runner(launch, default_pool()), {1: alone[known]}, size)

    return judge


@pytest.mark.parametrize(
    ("arguments", "size", "remark"),
    [
        ((), 3, "compared: the number read at with_extras.py:"),
        (("--loss", "by rows"), 3, "the loss of one process is the mean over ranks by their rows of theirs"),
        (("--loss", "sum"), 2, "the loss of one process is the sum over ranks of theirs"),
    ],
)
def test_a_right_script_passes_and_all_that_it_keeps_is_listed(judge, arguments, size, remark):
    judgement = judge(*arguments, size=size)
    assert judgement.verdict is Verdict.PASS, judgement
    assert any(line.startswith(remark) for line in judgement.compared), judgement
    everything = (
        r"other settings \(momentum.*before clipping.*the optimizer's state \(4 tensors, 29 .*buffers "
        r"\(1 tensors, 5"
    )
    assert re.search(everything, judgement.compared[0])
    assert judgement.compared[1] == "compared at the end: weights kept as 'average.weights'"


def test_a_loss_that_is_zero_by_design_decides_nothing(judge):
    judgement = judge("--loss", "zero", inert=False)
    assert judgement.verdict is Verdict.PASS, judgement
    assert "not decided: loss: it is zero but for roundings" in judgement.compared, judgement
    assert judge("--loss", "zero", "--mistake", "summed", inert=False).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("log", r"number taken at with_extras.py:\d+ .* reduced wrongly"),
        ("first log", r"number taken at with_extras.py:\d+ .* reduced wrongly \(0.5 times as large"),
        ("scaled back", r"loss at step 0.*neither as mean nor as sum over ranks: it is scaled"),
        ("decay", r"setting weight_decay .*weight_decay depends on the number of ranks"),
        ("own decay", r"1.weight differs .* optimizer's weight_decay is 0.01 on rank 0 and 0.02 on rank 1"),
        ("momentum", r"optimizer state momentum_buffer of 1.weight at step 0.*outside of its step"),
        ("own mean", r"buffer 0.mean differs between ranks 0 and 1"),
        ("average", r"weights kept as 'average.weights'.*this copy of them does not: its decay"),
        ("overlap", r"at step 0 5 of the rows .* taken by no rank and 5 of the rows .* before.*overlap"),
    ],
)
def test_each_mistake_beside_the_weights_is_found(judge, mistake, message):
    judgement = judge("--mistake", mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence), judgement.sentence


def test_a_sum_over_ranks_that_python_divides_is_compared_as_it_is_then(judge):
    judgement = judge("--mistake", "divided in Python", inert=False)
    assert judgement.verdict is Verdict.PASS, judgement
    assert any(re.match(r"compared: the number read at with_extras.py:112, 2", line) for line in judgement.compared)


def test_a_buffer_that_differs_beside_the_loss_is_named(judge):
    judgement = judge("--mistake", "scaled mean", inert=False)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "At this step buffer 0.mean is 2 times that of one process, too." in judgement.sentence, judgement


def test_a_number_that_was_read_before_a_difference_is_suspected():
    def world(*ranks):
        losses = [SimpleNamespace(losses=(3.0,)), SimpleNamespace(losses=(2.0,))]
        numbers = [{"train.py:9": NumbersTaken(read=list(read), values=list(read))} for read in ranks]
        return SimpleNamespace(size=len(ranks), ranks=[SimpleNamespace(numbers=each, steps=losses) for each in numbers])

    one = world((1.5, 1.0))
    assert "The number read at train.py:9 before is 2 times that" in suspects(one, world((3.0, 2.0), (3.0, 2.0)), 2)
    assert "The number read at train.py:9 before is each rank's own" in suspects(one, world((1.0, 1.5), (2.0, 0.5)), 2)
    assert suspects(one, world((3.0, 2.0), (3.0, 2.0)), 0) == suspects(one, world((1.5, 1.0), (1.5, 1.0)), 2) == ""
    assert (
        suspects(one, world((3.0, 2.0), (3.0, 2.0)), 1) != "" and suspects(one, world((1.5, 7.0), (1.5, 7.0)), 1) == ""
    )


def test_a_loss_that_one_rank_logs_is_known_whatever_python_divides_it_by(judge):
    for mistake, line in (("sum on rank 0", 114), ("sum on rank 0, rarely", 116)):
        judgement = judge("--mistake", mistake, inert=False)
        assert judgement.verdict is Verdict.FAIL, judgement
        assert re.search(rf"with_extras.py:{line} .* reduced wrongly \(2 times as large", judgement.sentence), judgement


def test_a_time_that_is_logged_is_not_compared(judge):
    judgement = judge("--mistake", "time", inert=False)
    assert judgement.verdict is Verdict.PASS, judgement
    assert any(re.match(r"not compared: the number read at with_extras.py:120", line) for line in judgement.compared)


def test_a_sum_that_clipping_hides_is_found_before_the_clip(judge):
    judgement = judge("--mistake", "summed", "--clip", "1e-9", inert=False)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(r"gradient before clipping of 1.weight at step 0.*2 times", judgement.sentence), judgement.sentence


def test_losses_that_are_weighted_by_what_is_not_seen_are_unknown(judge):
    judgement = judge("--loss", "weighted", inert=False)
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert re.match(r"trains as one process does, but loss at step 0 .*weights their gradients by", judgement.sentence)


def test_a_number_that_one_process_does_not_have_is_named_with_that_of_one_process(judge):
    judgement = judge("--mistake", "metric", inert=False)
    assert judgement.verdict is Verdict.PASS, judgement
    remark = (
        r"not compared: the number read at with_extras.py:\d+ is the same on all ranks but differs from one process: "
    )
    assert any(re.match(remark + r"got \d\.\d+, expected \d\.\d+$", line) for line in judgement.compared), judgement


@pytest.mark.parametrize(
    ("passes", "differ"), [(((1, 2), (1, 2)), False), (((1, 2), (1, 3)), True), (((1,), (1,)), False)]
)
def test_backward_passes_are_counted_rank_by_rank(passes, differ):
    """Not all ranks' together: then their numbers always differ, and a log that is reduced wrongly was not judged."""

    def world(*ranks):
        steps = [[SimpleNamespace(losses=(0.0,) * count) for count in counts] for counts in ranks]
        return SimpleNamespace(ranks=[SimpleNamespace(steps=each) for each in steps])

    assert Pair(None, world((1, 2)), world(*passes)).passes_differ is differ
    assert not Pair(None, world(*passes), world(*passes)).passes_differ, "each rank beside itself, in as many"
