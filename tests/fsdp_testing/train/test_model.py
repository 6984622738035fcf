"""Models on N ranks against one process: right ones pass under each implementation, and each way to be wrong has its words."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fsdp_testing
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin import model_checks
from fsdp_testing.plugin.model_checks import ModelDiffersAsExpected
from fsdp_testing.ranks.pool import Fate, RankOutcome, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.cause import Hung
from fsdp_testing.train.model import ModelDiffers, ModelUndecided, check_model
from fsdp_testing.train.model_families import MODELS

PLAIN = ("torch-ddp", "torch-fsdp2", "fsdp_ref-wrapper")


class Output(NamedTuple):
    loss: torch.Tensor


class TiedModel(nn.Module):
    """A decoder in miniature: blocks in a list, the embedding's weights at the head, one parameter that nothing uses."""

    def __init__(self, noise=False, scale=1.0):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)) for _ in range(2))
        self.unused = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.noise, self.scale = noise, scale

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.noise:
            hidden = hidden * (1 + os.urandom(1)[0])
        return Output(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) * self.scale)


def tied():
    return TiedModel()


def noisy():
    return TiedModel(noise=True)


def flat():
    return TiedModel(scale=0.0)


def failing():
    raise ValueError("no weights here")


class RankedModel(TiedModel):
    """Fails where there are several ranks."""

    def forward(self, input_ids, labels):
        if len(input_ids) < 4:
            raise ValueError("too few rows")
        return super().forward(input_ids, labels)


def ranked():
    return RankedModel()


class NearlyRight(TiedModel):
    """Scales its loss a little where there are several ranks."""

    def forward(self, input_ids, labels):
        loss = super().forward(input_ids, labels).loss
        return Output(loss * (1.0001 if len(input_ids) < 4 else 1.0))


def nearly():
    return NearlyRight()


class SaysTwice(TiedModel):
    """Says twice its loss where there are several ranks, with the gradient of the loss."""

    def forward(self, input_ids, labels):
        loss = super().forward(input_ids, labels).loss
        return Output(loss + loss.detach() if len(input_ids) < 4 else loss)


def says_twice():
    return SaysTwice()


@fsdp_testing.parametrize_with_models(tied, implementations=PLAIN)
def test_a_right_model_passes_and_says_what_was_compared(check):
    report = str(check())
    assert f"tied under {check.implementation} on 2 ranks: 2 steps match those of one process" in report
    # The tied weight, four tensors of each block and the unused one, each with its gradient.
    assert "20 gradients and parameters" in report


def test_three_ranks_pad_and_pass():
    assert check_model(tied, "fsdp_ref-wrapper", world_size=3).ranks == 3


def test_what_an_implementation_computes_wrongly_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "quality" / "broken"))
    with pytest.raises(ModelDiffers, match=r"gradient of .* at step 0 is off by"):
        check_model(tied, "faults_gradients:SumForMean")


def test_a_model_that_fails_on_ranks_alone_differs():
    with pytest.raises(ModelDiffers, match="does not train as it does in one process: .*too few rows"):
        check_model(ranked)


def test_a_gradient_that_is_off_by_a_ten_thousandth_differs():
    with pytest.raises(ModelDiffers, match=r"(loss|gradient of .*) at step 0 is off by"):
        check_model(nearly)


def test_a_loss_that_is_said_wrongly_differs_though_all_else_agrees():
    with pytest.raises(ModelDiffers, match=r"loss at step 0 is off by"):
        check_model(says_twice)


class SlowOnce:
    """A pool whose first world of two ranks is said to have hung."""

    def __init__(self):
        self.hung = False

    def expect(self, *modules):
        default_pool().expect(*modules)

    def shared_directory(self, prefix):
        return default_pool().shared_directory(prefix)

    def world(self, size, *_):
        world = default_pool().world(size)
        return world if self.hung or size == 1 else self.slow(world)

    def slow(self, world):
        self.hung = True
        ranks = tuple(RankOutcome(rank, Fate.HUNG) for rank in range(2))
        outcome = WorldOutcome("model", 2, "gloo", ranks, Hung((0, 1), 1.0, (), ()))
        return SimpleNamespace(execute=lambda *_, **__: outcome, release=world.release)


def test_of_a_model_that_hung_once_nothing_is_known():
    with pytest.raises(ModelUndecided, match="run again, it finished"):
        check_model(tied, pool=SlowOnce())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (noisy, "does not repeat itself: two runs in one process differ, first in loss"),
        (flat, "no gradient other than zero"),
        (failing, "does not train in one process.*no weights here"),
    ],
)
def test_what_says_nothing_is_undecided(model, message):
    with pytest.raises(ModelUndecided, match=f"(?s){message}"):
        check_model(model)


def test_expected_failures_are_strict_and_have_to_exist():
    entry = {"reason": "known", "says": "differs from one process: loss"}
    mark = fsdp_testing.parametrize_with_models(
        tied, implementations=PLAIN, expected_failures={"tied-torch-ddp": entry}
    )
    expected = {parameter.id: [mark.kwargs for mark in parameter.marks] for parameter in mark.args[1]}
    assert expected["tied-torch-fsdp2"] == []
    assert expected["tied-torch-ddp"] == [{"reason": "known", "raises": ModelDiffersAsExpected, "strict": True}]
    with pytest.raises(InvalidArgument, match="expected names as 'tied-torch-ddp', got \\['other'\\]"):
        fsdp_testing.parametrize_with_models(tied, implementations=PLAIN, expected_failures={"other": "known"})
    with pytest.raises(InvalidArgument, match="entries with reason and says, got others for \\['tied-torch-ddp'\\]"):
        fsdp_testing.parametrize_with_models(
            tied, implementations=PLAIN, expected_failures={"tied-torch-ddp": {"reason": "known"}}
        )


@pytest.mark.parametrize(
    ("entry", "raised"),
    [
        ({"reason": "known", "says": "differs from one process: loss*off"}, ModelDiffersAsExpected),
        ({"reason": "known", "says": "ranks hold different numbers"}, ModelDiffers),
        ("known", ModelDiffers),
    ],
)
def test_a_model_is_known_to_differ_by_what_the_message_says(monkeypatch, entry, raised):
    def differs(*_, **__):
        raise ModelDiffers("tied under torch-ddp on 2 ranks differs from one process: loss 0.3 is 0.1 off.")

    monkeypatch.setattr(model_checks, "check_model", differs)
    mark = fsdp_testing.parametrize_with_models(
        tied, implementations=PLAIN, expected_failures={"tied-torch-ddp": entry}
    )
    (bound,) = [parameter.values[0] for parameter in mark.args[1] if parameter.id == "tied-torch-ddp"]
    with pytest.raises(ModelDiffers) as caught:
        bound()
    assert type(caught.value) is raised
    if raised is ModelDiffers:
        said = re.search(r"To expect this failure, write: (\{.*\})$", str(caught.value))
        assert said is not None
        again = fsdp_testing.parametrize_with_models(
            tied, implementations=PLAIN, expected_failures={"tied-torch-ddp": ast.literal_eval(said[1])}
        )
        (bound,) = [parameter.values[0] for parameter in again.args[1] if parameter.id == "tied-torch-ddp"]
        with pytest.raises(ModelDiffersAsExpected):
            bound()


def test_packages_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(InvalidArgument, match="expected Transformers to be installed, and it is not"):
        fsdp_testing.parametrize_with_models()
    with pytest.raises(InvalidArgument, match="expected Accelerate to be installed"):
        check_model(tied, "accelerate")
    with pytest.raises(InvalidArgument, match="expected at least 2 ranks, got 1"):
        check_model(tied, world_size=1)


@pytest.mark.parametrize("implementation", [*PLAIN, "accelerate"])
def test_models_of_transformers_pass(implementation):
    pytest.importorskip("transformers", reason="Transformers is not installed: its models are not tried")
    if implementation == "accelerate":
        pytest.importorskip("accelerate", reason="Accelerate is not installed: it is not tried")
    assert check_model("gpt2", implementation).tensors
    assert len(MODELS) >= 40


def test_a_family_that_is_not_there_is_named():
    pytest.importorskip("transformers", reason="Transformers is not installed: its models are not tried")
    with pytest.raises(InvalidArgument, match="causal language models of the installed Transformers, got 'gpt9'"):
        check_model("gpt9")
