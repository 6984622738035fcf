"""Modules that are changed after sharding: what would be trained on each rank alone is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_ref

EVERY = pytest.mark.parametrize("path", ["wrapper", "flat", "composable"])


class Adapted(nn.Module):
    """A layer inside an adapter of low rank."""

    def __init__(self, inner: nn.Module, *, trained: bool) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(5, 2, dtype=torch.float64).requires_grad_(trained)
        self.up = nn.Linear(2, 4, dtype=torch.float64).requires_grad_(trained)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def inside(model):
    return getattr(model, "module", model)


def block(model, place):
    found = inside(model).blocks[place]
    return getattr(found, "module", found)


def refused(lab, model):
    """Return what the forward says; the model does not communicate, so each rank may be the only one."""
    with pytest.raises(fsdp_ref.errors.FsdpRuntimeError, match="before sharding") as caught:
        model(lab.batch())
    with torch.no_grad():
        model(lab.batch())
    return str(caught.value)


@EVERY
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.world(2)
def test_what_is_trained_and_not_managed_is_refused(lab, path, ran):
    reference = lab.make(lab.Net)
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    if ran:
        lab.loss(model, lab.batch()).backward()
        model.zero_grad()
    new = nn.Linear(5, 4, dtype=torch.float64)
    first, second = block(model, 0), block(model, 1)
    old, first.lin2 = first.lin2, new
    said = refused(lab, model)
    assert "blocks.0.lin2.weight, blocks.0.lin2.bias;" in said
    assert said.count("blocks.0.lin2.weight") == 2  # the new one, and the one that is gone
    first.lin2 = Adapted(old, trained=True)
    assert "manages: blocks.0.lin2.down.weight, blocks.0.lin2.down.bias, blocks.0.lin2.up.weight" in refused(lab, model)
    first.lin2 = old
    old.lora = nn.Linear(4, 1)
    second.register_parameter("gain", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    assert "manages: blocks.0.lin2.lora.weight, blocks.0.lin2.lora.bias, blocks.1.gain." in refused(lab, model)
    del old.lora, second.gain
    first.register_parameter("moved", next(model.parameters()))
    assert "blocks.0.moved" in refused(lab, model)
    del first.moved
    inside(model).blocks.append(lab.shard(lab.make(lab.Block), path))
    assert "got units made after the first forward: blocks.3. Replace" in refused(lab, model)
    del inside(model).blocks[3]
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    lab.loss(model, lab.batch(1)).backward()
    optims[0].step()
    lab.reference_step(reference, lab.batches(1), optim=optims[1])
    lab.assert_params(model, reference)


@EVERY
@pytest.mark.world(2)
def test_what_is_not_trained_or_managed_all_the_same_runs(lab, path):
    reference = lab.make(lab.Net)
    model = copy.deepcopy(reference)
    ignored = model.blocks[2]
    model = lab.shard(model, path, policy={lab.Block}, ignored_modules=[ignored])
    ignored.extra = nn.Linear(2, 2)
    ignored.register_parameter("more", nn.Parameter(torch.ones(1)))
    first = block(model, 0)
    first.lin2 = adapter = Adapted(first.lin2, trained=False)
    inside(model).out = checkpoint_wrapper(inside(model).out)
    trained = [model, copy.deepcopy(model)]
    for each in trained:
        lab.loss(each, lab.batch()).backward()
    assert model(lab.batch()).requires_grad
    adapter.up.requires_grad_(True)
    assert "manages: blocks.0.lin2.up.weight, blocks.0.lin2.up.bias." in refused(lab, model)
    first.lin2 = nn.Identity()  # what is gone is no error by itself
    inside(model).blocks[0] = nn.Identity()
    model(lab.batch())
    lab.loss(trained[1], lab.batch()).backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning")
@pytest.mark.world(2)
def test_values_assigned_beside_one_flat_parameter_are_refused(lab, strategy):
    """A frozen one was passed over: every forward went on with the flat parameter."""
    model = lab.shard(lab.make(lab.Net), "flat", sharding_strategy=getattr(fsdp_ref.ShardingStrategy, strategy))
    model(lab.batch())
    holder = next(module for module in model.modules() if isinstance(module, nn.Linear))
    held = holder.weight
    holder.weight = nn.Parameter(torch.zeros(held.shape, dtype=held.dtype), requires_grad=False)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(fsdp_ref.errors.FsdpRuntimeError, match="expected placeholders, got values at"):
            model(lab.batch())
    del holder.weight
    holder.__dict__["weight"] = held
    twin = copy.deepcopy(model)
    assert torch.equal(twin(lab.batch()), model(lab.batch()))


@pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning")
@pytest.mark.world(2)
def test_a_module_beside_one_flat_parameter_refuses_to_compute_by_itself(lab):
    """torch multiplied by a placeholder on the meta device: what came was uninitialised memory."""
    model = lab.shard(lab.make(lab.Net), "flat", sharding_strategy=fsdp_ref.ShardingStrategy.NO_SHARD)
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.bias = None
    with pytest.raises(fsdp_ref.errors.FsdpRuntimeError, match="expected a parameter with values"):
        linear(torch.ones(2, linear.in_features, dtype=torch.float64))
