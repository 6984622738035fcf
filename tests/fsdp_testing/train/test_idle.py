"""Nothing is not a pass: what does nothing in a training is told beside the verdict, or fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_testing import check_training
from fsdp_testing.cases.records import Verdict
from fsdp_testing.train import idle as module
from fsdp_testing.train.comparison import side_by_side
from fsdp_testing.train.function import TrainingDiffers, TrainingUndecided
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_idle_parts.py")


@pytest.mark.parametrize(
    ("idle", "lines"),
    [
        (
            "none",
            [
                "compared with what autograd gave in backward: the stepped gradient is the mean over ranks of the",
                "dtypes as the optimizer steps: weights float32, gradients float32, the optimizer's state float32",
            ],
        ),
        ("rates", ["nothing: groups were made with learning rates 0.1, 0.01, and at each step all have the same"]),
        ("schedule", ["nothing: the learning rate's schedule (StepLR) was made and is not stepped in these 3 steps"]),
        ("clip", ["nothing: clip_grad_norm_ clips at no step, norms are at most"]),
        ("loss", ["nothing: the loss does not change, it is 0 at each step"]),
        ("layer", ["nothing: no gradient other than zero reaches 2 of 6 parameters, first unused.weight"]),
        ("bfloat16", ["warning: weights are stepped in bfloat16, without a copy in float32"]),
    ],
)
def test_what_does_nothing_is_told(idle, lines):
    launch = Launch(SCRIPT, ("--idle", idle), steps=3, isolation="warm")
    (judgement,) = examine(launch, (2,)).judgements
    assert judgement.verdict is Verdict.PASS, str(judgement)
    told = [line for line in judgement.compared if line.startswith(("nothing", "warning", "dtypes", "compared with"))]
    assert all(any(line.startswith(words) for line in told) for words in lines), judgement
    assert len([line for line in told if line.startswith("nothing")]) == (idle not in ("none", "bfloat16")), told


def test_a_parameter_that_no_step_changes_though_a_gradient_reaches_it_is_told(monkeypatch):
    weight, bias = (Quantity(Kind.PARAMETER, name) for name in ("weight", "bias"))
    start = {weight: [torch.zeros(2)], bias: [torch.ones(2)]}
    monkeypatch.setattr(module, "initial", lambda _run: start)

    def told(gradient, bias_after):
        quantities = {Quantity(Kind.GRADIENT, "bias"): [gradient], weight: [torch.ones(2)], bias: [bias_after]}
        run = SimpleNamespace(quantities=quantities, names=lambda kind: [key for key in quantities if key.kind is kind])
        return module._unmoved(run)

    one = "nothing: no step changes 1 of 2 parameters, first bias, though a gradient reaches them"
    assert told(torch.ones(2), torch.ones(2)) == one
    assert told(torch.zeros(2), torch.ones(2)) == told(torch.ones(2), torch.zeros(2)) == ""


HOOKS = str(Path(__file__).parent / "with_hooks.py")


@pytest.mark.parametrize(
    ("way", "kind", "idle"),
    [
        ("ddp", "gradient", 0),
        ("ddp", "accumulated", 0),
        ("fsdp2", "gradient", 2),
        ("fsdp2", "accumulated", 2),
        ("fsdp2", "after", 0),
        ("fsdp1", "gradient", 2),
    ],
)
def test_hooks_on_parameters_that_never_run_are_told(way, kind, idle):
    launch = Launch(HOOKS, ("--way", way, "--kind", kind), steps=2, isolation="warm")
    (judgement,) = examine(launch, (2,)).judgements
    assert judgement.verdict is Verdict.PASS, str(judgement)
    told = [line for line in judgement.compared if "hook(s)" in line]
    assert [line.partition(",")[0] for line in told] == [f"nothing: {idle} hook(s) on parameters never ran"] * bool(
        idle
    )
    assert all("the first registered at with_hooks.py:" in line for line in told)


EVALUATIONS = str(Path(__file__).parent / "with_evaluations.py")


@pytest.mark.parametrize("more", [(), ("--low",)])
def test_weights_that_stay_unsharded_through_a_step_are_old(more):
    (judgement,) = examine(Launch(EVALUATIONS, more, steps=3, isolation="warm"), (2,)).judgements
    assert judgement.verdict is Verdict.FAIL, str(judgement)
    assert "after step 0 the model goes on with old values of 2 parameters, first 2.weight" in judgement.sentence
    (judgement,) = examine(Launch(EVALUATIONS, ("--reshards", *more), steps=3, isolation="warm"), (2,)).judgements
    assert judgement.verdict is Verdict.PASS, str(judgement)


class LosesUpdates(torch.optim.SGD):
    """Steps copies of the weights, and forgets them."""

    def step(self, closure=None):
        groups = [group["params"] for group in self.param_groups]
        before = [[p.detach().clone() for p in params] for params in groups]
        super().step(closure)
        for params, values in zip(groups, before):
            for parameter, value in zip(params, values):
                parameter.data.copy_(value)


def loses_its_updates(world):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = LosesUpdates(model.parameters(), lr=0.1)
    for step in range(2):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return {"weight": model.weight.detach()}


def test_a_loop_of_which_no_step_moves_a_weight_fails():
    with pytest.raises(TrainingDiffers, match=r"no weight changes in any step, though at step 0 learning rate times"):
        check_training(loses_its_updates, world_sizes=(1, 2))


def steps_nothing(world):
    torch.manual_seed(0)
    model, losses = nn.Linear(3, 1).double(), []
    for step in range(2):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step)).double()
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return {"loss": losses}


def steps_by_hand(world):
    torch.manual_seed(0)
    model, losses = nn.Linear(3, 1).double(), []
    for step in range(2):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step)).double()
        loss = model(inputs).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        losses.append(loss.detach())
    return {"loss": losses}


def test_a_loop_that_steps_nothing_and_returns_its_loss_is_no_pass():
    with pytest.raises(TrainingUndecided, match="2 backward passes ran, no optimizer stepped, no weight moved"):
        check_training(steps_nothing, world_sizes=(1, 2))
    check_training(steps_by_hand, world_sizes=(1, 2))


def test_a_norm_that_was_not_measured_is_no_zero():
    *_, row = side_by_side([(1.0, None)], [(2.0, 0.5)], ("1 rank", "2 ranks"))
    assert row.split() == ["0", "1", "2", "-", "0.5"]
