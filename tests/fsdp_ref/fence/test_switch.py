"""Guards change no number: a tree without them trains alike, and says nothing of its user's mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import fence
from fsdp_ref.annotations import units_in
from fsdp_ref.errors import ExecutionOrderError, FsdpRuntimeError
from fsdp_ref.runtime.guards import TREE_GUARDS, UNIT_WATCHES
from fsdp_ref.wrap import ModuleWrapPolicy


@pytest.fixture
def core_alone() -> Iterator[None]:
    """No guards for what is made in this test."""
    fence.remove()
    yield
    fence.install()


def trained(trial, api, strategy):
    """Weights, gradients and losses of a training with accumulation, an evaluation and an edit of full parameters."""
    t = trial(api, strategy)
    seen = []
    for step in range(3):
        t.zero_grad()
        with t.no_sync(step == 1):
            t.loss(t.inputs(step)).backward()
        loss = t.loss(t.inputs(10 + step))
        loss.backward()
        t.optimizer.step()
        with torch.no_grad():
            seen += [loss.detach(), t.loss(t.inputs(20 + step))]
        with FSDP.summon_full_params(t.model), torch.no_grad():
            for param in t.model.parameters():
                param.mul_(0.99)
        seen += [param.grad.clone() for param in t.model.parameters() if param.grad is not None]
    with FSDP.summon_full_params(t.model, writeback=False):
        return seen + [param.detach().clone() for param in t.model.parameters()], t.model


@pytest.mark.world([2, 3])
def test_numbers_are_the_same_to_the_bit(world, trial, api, strategy):
    guarded, _ = trained(trial, api, strategy)
    fence.remove()
    try:
        alone, model = trained(trial, api, strategy)
    finally:
        fence.install()
    assert len(guarded) == len(alone) > 10
    assert all(torch.equal(one, other) for one, other in zip(guarded, alone, strict=True))
    assert units_in(model)[0].root.guards.members == ()


@pytest.mark.world(2)
def test_without_the_fence_ranks_in_another_order_are_not_told(world, trial, core_alone):
    """The mistake of `test_wire_order`: with guards it raises on all ranks."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x, first=0):
            return self.experts[1 - first](self.experts[first](x))

    def run(model):
        model(torch.ones(2, 6, dtype=torch.float64), first=world.rank).sum().backward()

    made = trial("orig", "FULL_SHARD", model=Experts, policy=ModuleWrapPolicy({nn.Linear}))
    run(made.model)
    fence.install()
    guarded = trial("orig", "FULL_SHARD", model=Experts, policy=ModuleWrapPolicy({nn.Linear}))
    with pytest.raises(ExecutionOrderError):
        run(guarded.model)
    dist.barrier()


@pytest.mark.world(2)
def test_a_parameter_that_comes_later_is_refused_by_a_guard_alone(world, trial):
    for guarded in (True, False):
        (fence.install if guarded else fence.remove)()
        try:
            t = trial("orig", "FULL_SHARD")
            t.loss(t.inputs(0)).backward()
            t.inner().late = nn.Linear(2, 2)
            if guarded:
                with pytest.raises(FsdpRuntimeError, match="late.weight"):
                    t.loss(t.inputs(0))
            else:
                t.loss(t.inputs(0)).backward()
        finally:
            fence.install()


def test_the_apis_put_the_fence_up():
    assert TREE_GUARDS
    assert UNIT_WATCHES
