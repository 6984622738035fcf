"""Ranks with different numbers of batches train as one process does; torch's own FSDP waits for ever (JOIN)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import UnevenInputs, clip_grad_norm_, fully_shard, unshard_params
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, UnsupportedError
from fsdp_ref.wrap import ModuleWrapPolicy

BATCHES = {2: (3, 1), 3: (1, 3, 0)}


class Model(nn.Module):
    """Has a buffer that each forward changes, and a layer that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.first(x)) + 0 * torch.rand(7, dtype=x.dtype))


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2 + rank, 5, dtype=torch.float64, generator=generator)


def reference(counts: tuple[int, ...]) -> list[torch.Tensor]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(max(counts)):
        losses = [model(batch(rank, step)).square().sum() for rank, count in enumerate(counts) if step < count]
        sum(losses).div(len(counts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def sharded(api: str) -> nn.Module:
    model = Model()
    if api == "composable":
        for part in (model.first, model.last, model):
            fully_shard(part)
        return model
    return FSDP(model, use_orig_params=api == "orig", auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@pytest.mark.world([2, 3])
@pytest.mark.covers("JOIN-01")
@pytest.mark.parametrize("api", ["flat", "orig", "composable"])
def test_ranks_with_fewer_batches_train_on(world, api):
    counts = BATCHES[world.size]
    model = sharded(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def finish() -> None:
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    uneven = UnevenInputs(model, (torch.zeros(1, 5, dtype=torch.float64),), finish)
    with warnings.catch_warnings(), Join([uneven]):  # Join adds a filter and leaves it
        for step in range(counts[world.rank]):
            model(batch(world.rank, step)).square().sum().backward()
            uneven.finish()
        random = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), random), "the example drew random numbers of this rank"
    assert next(iter(dict(model.named_buffers()).values())).item() == counts[world.rank]
    with unshard_params(model):
        got = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    due = torch.cat([parameter.reshape(-1) for parameter in reference(counts)])
    torch.testing.assert_close(got, due, rtol=0, atol=1e-12)
    # Outside of Join nothing is announced, and nothing is refused.
    with torch.no_grad():
        model(batch(0, 0))
        model(batch(0, 0))


@pytest.mark.world(2)
def test_what_a_rank_without_batches_cannot_follow_is_refused(world):
    model = sharded("composable")
    uneven = UnevenInputs(model, (torch.zeros(1, 5, dtype=torch.float64),), lambda: None)
    with (
        pytest.raises(FsdpRuntimeError, match=r"got a second forward before finish\(\)"),
        warnings.catch_warnings(),
        Join([uneven]),
    ):
        model(batch(world.rank, 0)).sum().backward()
        model(batch(world.rank, 1))
    uneven.end()
    again = UnevenInputs(sharded("orig"), (torch.zeros(1, 5, dtype=torch.float64),), lambda: None)
    with (
        pytest.raises(FsdpRuntimeError, match="got a forward without gradients"),
        warnings.catch_warnings(),
        Join([again]),
        torch.no_grad(),
    ):
        again._model(batch(world.rank, 0))
    apart = UnevenInputs(sharded("flat"), (torch.zeros(1, 5, dtype=torch.float64),), lambda: None)
    with (
        pytest.raises(FsdpRuntimeError, match=r"got a forward in no_sync\(\)"),
        warnings.catch_warnings(),
        Join([apart]),
        apart._model.no_sync(),
    ):
        apart._model(batch(world.rank, 0)).sum().backward()
    with pytest.raises(FsdpValueError, match="UnevenInputs: expected a module with units"):
        UnevenInputs(Model(), (), lambda: None)
    synchronised = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    with pytest.raises(UnsupportedError, match="SyncBatchNorm at 1"):
        UnevenInputs(synchronised, (), lambda: None)
