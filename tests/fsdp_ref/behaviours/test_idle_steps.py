"""A step without gradients after a forward pass: told, where nothing else could tell that backward(inputs=...) gave none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ShardingStrategy

S = ShardingStrategy
pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
TOLD = r"no backward has reached the sharded modules since.*without `inputs`"


def wrapped(strategy: ShardingStrategy = S.FULL_SHARD, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(3, 3).double(), sharding_strategy=strategy, **options)
    return FullyShardedDataParallel(
        nn.Sequential(inner, nn.Linear(3, 1).double()), sharding_strategy=strategy, **options
    )


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 3, dtype=torch.float64)).sum()
    return loss


@pytest.mark.world(3)
@pytest.mark.parametrize("flat", [False, True], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name)
def test_a_backward_of_chosen_inputs_is_told_at_the_step(world, strategy, flat):
    model = wrapped(strategy, use_orig_params=not flat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=TOLD):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # told once
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.world(2)
def test_steps_that_need_no_backward_are_not_told(world):
    model, critic = wrapped(), nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    optimizer.step()  # before any forward
    with torch.no_grad():
        loss_of(model)
    optimizer.step()  # after an evaluation
    critic(model(torch.ones(2, 3, dtype=torch.float64)).detach()).sum().backward()
    other.step()  # of somebody else's parameters
    loss_of(model).backward()
    loss_of(model)
    optimizer.step()  # with the gradients from before
