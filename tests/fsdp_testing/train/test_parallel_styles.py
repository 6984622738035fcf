"""Loops that divide the model or the sequence: what ranks rightly have of their own is no difference, and no cause of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing import check_training
from fsdp_testing.train.function import TrainingDiffers, TrainingPartlyUndecided, TrainingUndecided

TOKENS, STEPS = 12, 3


def data(step):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(TOKENS, columns, generator=draw, dtype=torch.float64) for columns in (4, 2)]


def train(model, loss_of, *, world, reduce=lambda model: None, factor=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, whole = loss_of(model, *data(step))
        (loss * (factor if world.size > 1 else 1.0)).backward()
        reduce(model)
        optimizer.step()
        losses.append(whole.detach())
    return losses


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def all_tokens(model, inputs, targets):
    loss = (model(inputs) - targets).square().mean()
    return loss, loss


def tensor_parallel(world, factor=1.0):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp()
    if world.size > 1:
        parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return {"loss": train(model, all_tokens, world=world, factor=factor)}


def tensor_parallel_with_a_scaled_loss(world):
    return tensor_parallel(world, 1.5)


def sequence_parallel(world, weighted=True):
    """Ranks take different numbers of tokens; each calls backward on the mean of its own, and gradients are weighted by these."""
    edges = [0, TOKENS] if world.size == 1 else [0, 7, TOKENS]
    mine = slice(*edges[world.rank : world.rank + 2])
    share = (mine.stop - mine.start) / TOKENS if weighted else 1 / world.size

    def own_tokens(model, inputs, targets):
        loss = (model(inputs[mine]) - targets[mine]).square().mean()
        whole = loss.detach() * share
        dist.all_reduce(whole)
        return loss, whole

    def reduce(model):
        for parameter in model.parameters():
            parameter.grad *= share
            dist.all_reduce(parameter.grad)

    return {"loss": train(mlp(), own_tokens, world=world, reduce=reduce)}


def sequence_parallel_by_the_plain_mean(world):
    return sequence_parallel(world, weighted=False)


class ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        whole = inputs.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Split(nn.Module):
    """Columns of the first layer and rows of the second, as plain tensors; the first bias begins with zeros on all ranks.

    Transposed, nobody can tell by the values which part of one process's weights a rank has.
    """

    def __init__(self, world, transposed=False):
        super().__init__()
        self.transposed = transposed and world.size > 1
        whole, mine = mlp(), slice(world.rank * 6 // world.size, (world.rank + 1) * 6 // world.size)
        weight = whole[0].weight.detach()[mine]
        self.weight = nn.Parameter((weight.T if self.transposed else weight).clone())
        self.bias = nn.Parameter(torch.zeros(mine.stop - mine.start, dtype=torch.float64))
        self.outside = nn.Parameter(whole[2].weight.detach()[:, mine].clone())
        self.norm = nn.LayerNorm(2).double()

    def forward(self, inputs):
        weight = self.weight.T if self.transposed else self.weight
        inside = nn.functional.linear(ToAll.apply(inputs), weight, self.bias).tanh()
        return self.norm(FromAll.apply(nn.functional.linear(inside, self.outside)))


def split_by_hand(world, factor=1.0, transposed=False):
    return {"loss": train(Split(world, transposed), all_tokens, world=world, factor=factor)}


def split_transposed(world):
    return split_by_hand(world, transposed=True)


def split_by_hand_and_changed_at_the_end(world):
    model = Split(world)
    losses = train(model, all_tokens, world=world)
    with torch.no_grad():
        model.outside += 1e-3 * world.rank
    return {"loss": losses}


def split_transposed_and_returns_nothing(world):
    model = Split(world, transposed=True)
    del model.norm
    model.norm = nn.Identity()
    train(model, all_tokens, world=world)
    return {}


def split_by_hand_with_a_scaled_loss(world):
    return split_by_hand(world, 1.5)


def split_transposed_with_a_scaled_loss(world):
    return split_by_hand(world, 1.5, transposed=True)


@pytest.mark.filterwarnings("error::fsdp_testing.train.function.TrainingPartlyUndecided")
@pytest.mark.parametrize("loop", [tensor_parallel, sequence_parallel, split_by_hand])
def test_a_right_loop_passes(loop):
    check_training(loop, world_sizes=(1, 2))


def test_parts_that_ranks_have_of_their_own_are_told_and_the_rest_is_judged():
    with pytest.warns(TrainingPartlyUndecided, match=r"different parts under the same name, 3 parameters, first "):
        check_training(split_transposed, world_sizes=(1, 2))
    with pytest.raises(TrainingUndecided, match="can be compared, and no parameter either"):
        check_training(split_transposed_and_returns_nothing, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("loop", "first"),
    [
        (tensor_parallel_with_a_scaled_loss, "gradient of 0.weight at step 0"),
        (split_by_hand_with_a_scaled_loss, "gradient of weight at step 0"),
        (split_transposed_with_a_scaled_loss, "gradient of norm.weight at step 0"),
        (split_by_hand_and_changed_at_the_end, "weights at the end of outside is off by"),
        (sequence_parallel_by_the_plain_mean, "loss at step 0"),
    ],
)
def test_a_wrong_loop_fails_and_no_reduction_is_missed_that_is_not_due(loop, first):
    with pytest.raises(TrainingDiffers, match=first) as caught:
        check_training(loop, world_sizes=(1, 2))
    assert "Cause: gradients are not reduced" not in str(caught.value)
