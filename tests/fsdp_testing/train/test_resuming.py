"""fsdp-verify train --resume-at: a script that is stopped goes on from its own checkpoint as if it had not been."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.resuming import judge_resumed
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch, examine

SCRIPT = Path(__file__).parent / "with_extras.py"
LAUNCH = Launch(str(SCRIPT), steps=4, isolation="warm", resume_at=2)


@pytest.fixture(scope="module")
def resume():
    """Stop and resume on two ranks; mistakes are made in loading, so that runs that are not stopped are those of all."""
    runner = Runner(LAUNCH, default_pool())
    runs = {2: runner.run(2)}

    def resume(*arguments):
        return judge_resumed(Runner(replace(LAUNCH, arguments=arguments), default_pool()), runs, 2, (2,))

    return resume


def test_a_right_script_goes_on_at_the_same_and_at_another_number_of_ranks():
    report = examine(replace(LAUNCH, arguments=("--load", ""), resume_arguments=("--load", "state.pt")), (2,))
    assert [judgement.verdict for judgement in report.judgements] == [Verdict.PASS, Verdict.PASS], str(report)
    same = r"\(weights, optimizer's state and settings, rows, and 2 steps\)"
    wanted = (
        rf"stopped before step 2, it continues like the run that was not stopped: on 2 ranks {same}, on 1 ranks "
        rf"{same}"
    )
    assert re.fullmatch(wanted, report.judgements[1].sentence), str(report)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "optimizer not loaded",
            r"begins without state: 4 tensors, first .*momentum_buffer of 1.weight.*state is not saved",
        ),
        (
            "schedule not loaded",
            r"step 2 has another setting: learning rate is off by 0.025 .*schedule is not saved, or not",
        ),
        ("order anew", r"step 2 takes the rows of step 0 again. Cause: the order of the data starts over"),
        ("average not loaded", r"weights kept as 'average.weights'.*Cause: this copy of the weights is not saved"),
    ],
)
def test_what_is_not_restored_is_named(resume, mistake, message):
    judgement = resume("--mistake", mistake)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.match(rf"stopped before step 2 and resumed on 2 ranks .*{message}", judgement.sentence), judgement


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mistake", "nothing saved"), r"has saved nothing below its folder before step 2. Let it save earlier"),
        (("--load", ""), r"begins with the weights of step 0, though it had saved state.pt. .*\(--resume-args\)"),
    ],
)
def test_a_script_that_does_not_save_or_load_is_unknown(resume, arguments, message):
    judgement = resume(*arguments)
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert re.search(message, judgement.sentence), judgement


def test_a_step_that_is_not_compared_is_refused():
    with pytest.raises(InvalidArgument, match="expected a step below 4, the steps compared, got 4"):
        examine(replace(LAUNCH, resume_at=4), (2,))
