"""What a rank sees of a training step by step: what backward computes again is no batch and no loss."""

from __future__ import annotations

import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_testing.ranks.ledger import interception
from fsdp_testing.train.observation import Observer
from fsdp_testing.train.quantities import Kind, Quantity


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, hidden):
        hidden = self.blocks[0](hidden)
        return checkpoint(self.blocks[1], hidden, use_reentrant=self.reentrant)


@pytest.mark.world(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_backward_computes_again_are_no_batch(reentrant):
    model = Blocks(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = Observer()
    with ExitStack() as stack:
        for context in (observer.watch(), interception.listen(observer.see_collective)):
            stack.enter_context(context)
        for rows in (4, 5):
            model(torch.ones(rows, 3)).sum().backward()
        optimizer.step()
    [seen] = observer.steps
    assert [len(forward) for forward in seen.rows] == [4, 5]
    assert len(seen.losses) == seen.evidence.backwards == 2
    assert observer.reader.models == [model]


def step(model, *optimizers):
    model(torch.ones(2, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


class Preconditioned(torch.optim.SGD):
    """Keeps a matrix of each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("factor", self.made(parameter)).add_(1)
        super().step(closure)

    def made(self, parameter):
        return torch.zeros(2, 2)


class Unreadable(Preconditioned):
    def made(self, parameter):
        return torch.zeros(2, 2, device="meta")


@pytest.mark.parametrize("kind", [Preconditioned, Unreadable])
def test_state_of_any_shape_is_read_and_what_cannot_be_is_said(kind):
    model = nn.Linear(3, 1)
    observer = Observer()
    with observer.watch():
        step(model, kind(model.parameters(), lr=0.1))
    [seen] = observer.steps
    read = {key.name for key in seen.after if key.kind is Kind.MOMENT}
    if kind is Preconditioned:
        assert (read, seen.left_out) == ({"weight", "bias"}, {})
    else:
        assert (read, [*seen.left_out]) == (set(), ["the optimizer's state"])


def test_what_is_sparse_is_seen_as_it_is_when_dense():
    model = nn.Embedding(4, 2, sparse=True)
    observer = Observer()
    with observer.watch():
        model(torch.tensor([1, 3])).sum().backward()
        torch.optim.SparseAdam(model.parameters()).step()
    [seen] = observer.steps
    [gradient] = seen.of(Kind.GRADIENT)["weight"]
    assert gradient.values.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert seen.terms.passes[0]["weight"].tolist() == gradient.values.tolist()


class StepsInside(nn.Sequential):
    """Makes its step in its forward, as modules of Lightning do that optimize by hand."""

    def forward(self, hidden):
        super().forward(hidden).sum().backward()
        self.optimizer.step()


def test_a_forward_that_makes_steps_is_read_from_its_first_one():
    model = StepsInside(nn.Linear(3, 1))
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer, before = Observer(), model[0].weight.detach().flatten().tolist()
    with observer.watch():
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    first, _ = observer.steps
    [weight] = first.before[Quantity(Kind.PARAMETER, "0.weight")]
    assert weight.values.tolist() == before
    assert first.terms.passes[0]["0.weight"].tolist() == [2, 2, 2]


def test_a_training_ends_where_it_trains_and_not_where_one_rank_evaluates():
    model = nn.Linear(3, 1)
    ended = []
    observer = Observer(ended.append)
    with observer.watch():
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            model(torch.ones(2, 3))
        model.eval()(torch.ones(2, 3))
        assert (len(observer.steps), ended) == (1, [])
        model.train()(torch.ones(2, 3))
        assert ended == [1]


def test_steps_of_several_optimizers_without_a_forward_between_them_are_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    ended = []
    observer = Observer(ended.append)
    one, two = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters(), lr=0.2)
    with observer.watch():
        two.step()  # of which nothing is known: no forward was there
        step(model, one, two)
        assert ended == []
        step(model, one, two)
    observer.finish()
    assert [seen.settings["lr"] for seen in observer.steps] == [(0.1, 0.2)] * 2
    assert ended == [1]
    assert sorted(observer.steps[0].of(Kind.GRADIENT)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert {key.name for key in observer.steps[0].after if key.kind is Kind.MOMENT} == {"1.bias", "1.weight"}


def test_copies_that_are_stepped_stand_for_their_parameters_and_the_models_own_are_read_afterwards():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    copies = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
    observer = Observer()
    with observer.watch():
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        for tensor, parameter in zip(copies, model.parameters()):
            tensor.grad = parameter.grad.float()
        model.zero_grad()
        optimizer.step()
        model[1].weight.data.copy_(copies[2])
    observer.finish()
    [seen] = observer.steps
    assert (seen.strange, seen.given) == (0, 4)
    assert seen.of(Kind.PARAMETER)["1.weight"][0].dtype == torch.float32
    assert seen.of(Kind.GRADIENT)["1.weight"][0].values.any()
    assert Quantity(Kind.MOMENT, "1.weight", "momentum_buffer") in seen.after
    back = {
        name: torch.equal(span.values, seen.of(Kind.PARAMETER)[name][0].values.bfloat16())
        for name, [span] in seen.of(Kind.COPIED).items()
    }
    assert back == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": False}


def test_what_one_forward_gives_another_is_no_data():
    maker, judge = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    observer = Observer()
    with observer.watch():
        made = maker(torch.ones(2, 3))
        (judge(made.detach()).sum() + judge(torch.zeros(2, 3)).sum()).backward()
        optimizer.step()
    assert [len(rows) for rows in observer.steps[0].rows] == [2, 0, 2]


class Noisy(nn.Linear):
    """Multiplies by a number that it draws."""

    def forward(self, hidden):
        return super().forward(hidden) * self.draw()


@pytest.mark.parametrize(
    ("draw", "drew"),
    [(lambda: 1.0, False), (lambda: float(torch.rand(())), True), (random.random, True), (np.random.rand, True)],
)
def test_what_a_forward_draws_from_any_default_generator_is_seen(draw, drew):
    model = Noisy(3, 1)
    model.draw = draw
    observer = Observer()
    with observer.watch():
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert observer.steps[0].drew is drew
