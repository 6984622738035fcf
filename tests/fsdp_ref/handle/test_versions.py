"""Ranks agree whether what is gathered is old, whatever each of them sees of an optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ShardingStrategy, fully_shard

ROWS = torch.ones(2, 3, dtype=torch.float64)


def units(kind: str) -> nn.Module:
    """Return two units that stay unsharded after a forward; a rank lacks elements of some of their parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    if kind == "composable":
        for module in (model[0], model):
            fully_shard(module, reshard_after_forward=False)
        return model
    options = {"use_orig_params": kind == "orig", "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("kind", ["orig", "flat", "composable"])
def test_a_step_over_gradients_that_were_just_cleared_is_one_for_all_ranks(kind: str) -> None:
    model = units(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(ROWS).sum().backward()
    with no_sync(model):
        model(ROWS).sum().backward()  # stays gathered
    optimizer.zero_grad()
    optimizer.step()
    before = model(ROWS).detach().clone()
    model(ROWS).sum().backward()
    optimizer.step()
    assert not torch.equal(model(ROWS), before)
