"""fsdp-verify train: a gradient that differs begins to differ in backward or after it, and the report says which."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.train.check import judged
from fsdp_testing.train.quantities import LOSS, Kind, Quantity
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch
from fsdp_testing.train.terms import Terms
from fsdp_testing.train.terms_of_worlds import of_backward

SCRIPT = str(Path(__file__).parent / "with_backward.py")


REDUCTIONS = str(Path(__file__).parent / "with_reductions.py")


def of(mistake: str, script: str = SCRIPT):
    runner = Runner(Launch(script, ("--mistake", mistake), steps=2, isolation="warm"), default_pool())
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


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("clip before", r"Cause: at step 0 the gradient of \S+ is \S+ x rank 0's \+ \S+ x rank 1's \+ .*equal weights"),
        ("clamp before", r"It begins to differ after backward, .* \(a clip of a rank's own gradient"),
        (
            "own noise",
            r"differs between ranks 0 and 1 .*Cause: gradients are reduced, and then each rank steps another one: at step 0",
        ),
        ("broadcast", "Cause: at step 0 the gradient of scale is that of rank 0 alone"),
    ],
)
def test_a_reduction_that_weights_ranks_is_named(mistake, message):
    judgement = of(mistake, REDUCTIONS)
    assert judgement.verdict is Verdict.FAIL, judgement
    assert re.search(message, judgement.sentence), judgement.sentence


def test_gradients_that_are_clipped_after_the_reduction_pass():
    assert of("", REDUCTIONS).verdict is Verdict.PASS


@pytest.mark.parametrize(("loss", "placed"), [(2.0, True), (2.0 + 2e-7, True), (2.0 + 2e-5, False)])
def test_losses_that_agree_only_roughly_are_not_called_those_of_one_process(loss, placed):
    key = Quantity(Kind.GRADIENT, "weight")

    def world(size, gradient, loss):
        steps = [SimpleNamespace(terms=Terms(passes=({"weight": torch.tensor(gradient)},), roundoff=2**-24))]
        quantities = {key: [torch.tensor(gradient)], LOSS: [torch.tensor([loss])]}
        return SimpleNamespace(size=size, ranks=[SimpleNamespace(steps=steps)] * size, quantities=quantities)

    sentence = of_backward(world(1, [1.0, 2.0], 2.0), world(2, [1.0, 3.0], loss), key, 0, 64)
    assert ("begins to differ in backward" in sentence) is placed


@pytest.mark.parametrize(("in_backward", "told"), [(0.0, True), (1e-7, True), (9e-7, False)])
def test_what_backward_gave_already_is_not_called_later_however_small(in_backward, told):
    """Terms that agree roughly say nothing of a gradient that is off by no more."""
    key = Quantity(Kind.GRADIENT, "weight")

    def world(size, given, stepped):
        steps = [SimpleNamespace(terms=Terms(passes=({"weight": torch.tensor(given)},), roundoff=2**-24))]
        quantities = {key: [torch.tensor(stepped)], LOSS: [torch.tensor([2.0])]}
        return SimpleNamespace(size=size, ranks=[SimpleNamespace(steps=steps)] * size, quantities=quantities)

    one = world(1, [1.0, 0.01], [1.0, 0.01])
    sentence = of_backward(one, world(2, [1.0, 0.01 + in_backward], [1.0, 0.01 + 1e-6]), key, 0, 64)
    assert ("begins to differ after backward" in sentence) is told
