"""check_loss: a token-weighted loss with a KL term is the same for all ranks and micro-batches; mistakes are named."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing import check_loss
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.report import TrainingDiffers, TrainingUndecided


def batch(items=8):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 4, 3, 4, 1, 2, 1, 3])[:items]
    return {
        "inputs": torch.randn(items, 5, 3, generator=draw).double(),
        "mask": (torch.arange(5) < lengths[:, None]).double(),
    }


def model():
    torch.manual_seed(1)
    return nn.Linear(3, 1).double()


def terms(model, micro_batches, mistake=""):
    """Give the policy's loss and a KL term by tokens of all ranks; the mean of the ranks is what is stepped."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tokens = sum(part["mask"].sum() for part in micro_batches)
    if ranks > 1 and mistake != "own count":
        dist.all_reduce(tokens)
        tokens /= ranks
    policy = kl = 0.0
    for part in micro_batches:
        values = model(part["inputs"])[..., 0]
        due = part["mask"].sum() * len(micro_batches) if mistake == "mean of means" else tokens
        policy = policy + (values.square() * part["mask"]).sum() / due
        kl = kl + (values.exp() * part["mask"]).sum() / tokens
    if mistake == "undivided":
        policy, kl = policy * len(micro_batches), kl * len(micro_batches)
    return {"policy": policy / (ranks if mistake == "ranks" else 1), "kl": kl * (ranks if mistake == "kl" else 1)}


def loss(model, micro_batches):
    return sum(terms(model, micro_batches).values())


def own_count(model, micro_batches):
    return terms(model, micro_batches, "own count")


def mean_of_means(model, micro_batches):
    return terms(model, micro_batches, "mean of means")


def undivided(model, micro_batches):
    return terms(model, micro_batches, "undivided")


def by_ranks(model, micro_batches):
    return terms(model, micro_batches, "ranks")


def kl_per_rank(model, micro_batches):
    return terms(model, micro_batches, "kl")


def without_graph(model, micro_batches):
    return loss(model, micro_batches).detach()


def with_dropout(model, micro_batches):
    return sum(nn.functional.dropout(model(part["inputs"])).mean() for part in micro_batches)


def test_a_right_loss_passes_on_ranks_and_without_any():
    check_loss(loss, model(), batch(), world_sizes=(1, 2), micro_batches=(1, 2))
    check_loss(terms, model(), batch(), world_sizes=(1,), micro_batches=(1, 2, 4, 8))


@pytest.mark.parametrize(
    ("wrong", "sizes", "message"),
    [
        (
            mean_of_means,
            (1,),
            r"1 rank of 2 micro-batches: the term policy .*a mean of means: each micro-batch is divided",
        ),
        (
            undivided,
            (1,),
            r"1 rank of 2 micro-batches: .* is 2 times as large: micro-batches are added and not divided",
        ),
        (
            own_count,
            (1, 2),
            r"2 ranks of 1 micro-batch: .*a mean of means: each (rank|micro-batch) is divided by its own",
        ),
        (
            by_ranks,
            (1, 2),
            r"2 ranks of 1 micro-batch: the term policy .*is 1/2 of it: it is divided by the number of ranks",
        ),
        (kl_per_rank, (1, 2), r"2 ranks of 1 micro-batch: the term kl .* is 2 times as large: each of 2 ranks adds"),
    ],
)
def test_each_mistake_is_named_with_its_term(wrong, sizes, message):
    with pytest.raises(TrainingDiffers, match=message):
        check_loss(wrong, model(), batch(), world_sizes=sizes, micro_batches=(1, 2))


def test_what_cannot_be_compared_is_said():
    check = functools.partial(check_loss, model=model(), world_sizes=(1,), micro_batches=(1, 2))
    with pytest.raises(TrainingUndecided, match="its gradient is zero"):
        check(without_graph, batch=batch())
    with pytest.raises(TrainingUndecided, match="draws random numbers"):
        check(with_dropout, batch=batch())
    with pytest.raises(InvalidArgument, match="got 7 items and 1 x 2. Give another batch"):
        check(loss, batch=batch(7))
    with pytest.raises(InvalidArgument, match=r"one number of items, got \[2, 3\]"):
        check(loss, batch={"a": torch.ones(2), "b": torch.ones(3)})
