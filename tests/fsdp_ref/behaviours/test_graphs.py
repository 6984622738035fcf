"""Graphs of every kind: views, losses from the middle, pieces, derivatives of derivatives, units used in part or again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy
from fsdp_ref.composable import fully_shard, replicate
from fsdp_ref.states import TrainingState

S = ShardingStrategy
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)


@pytest.mark.world(2)
@pytest.mark.covers("B047", "B132")
@strategies
def test_an_output_that_is_a_view_and_is_changed_in_place(lab, path, strategy):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 4)

        def forward(self, x):
            return self.lin(x).view(-1)

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.views, self.out = Views(), nn.Linear(4, 1)

        def forward(self, x):
            y = self.views(x)
            y += 1.0
            return self.out(y.view(-1, 4))

    lab.parity(Changes, path, policy={Views}, sharding_strategy=strategy)


@pytest.mark.world(2)
@pytest.mark.covers("B048", "B131", "RUN-07")
@strategies
def test_a_loss_that_bypasses_the_outputs(lab, path, strategy):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(3, 4), nn.Linear(4, 4)
            self.kept = []

        def forward(self, x):
            y = self.inp(x)
            self.kept.append(y.tanh())
            return self.out(y)

    def loss(model, x):
        inner = model if hasattr(model, "kept") and not isinstance(model, FSDP) else model.module
        model(x)
        return inner.kept.pop().square().mean()

    lab.parity(Keeps, path, policy={nn.Linear}, sharding_strategy=strategy, loss=loss)


@pytest.mark.world(2)
@pytest.mark.covers("B123", "B134", "STRAT-06")
def test_backward_through_pieces(lab, path):
    reference = lab.make()
    model = copy.deepcopy(reference)
    first, second = model.blocks[0], model.blocks[1]
    stages = [lab.shard(first, path), lab.shard(second, path)]
    x = lab.batch(shape=(2, 4)).requires_grad_()
    middle = stages[0](x)
    cut = middle.detach().requires_grad_()
    loss = stages[1](cut).square().mean()
    (grad,) = torch.autograd.grad(loss, [cut], retain_graph=True)
    loss.backward()
    middle.backward(grad)
    for rank in range(lab.world.size):
        batch = lab.batch(rank=rank, shape=(2, 4))
        (reference.blocks[1](reference.blocks[0](batch)).square().mean() / lab.world.size).backward()
    for stage, block in zip(stages, reference.blocks, strict=False):
        if path != "flat":
            lab.assert_grads(stage, block)
        torch.optim.SGD(stage.parameters(), lr=0.1).step()
        torch.optim.SGD(block.parameters(), lr=0.1).step()
        lab.assert_params(stage, block)


@pytest.mark.world(2)
@pytest.mark.covers("B138")
@strategies
def test_forward_mode_derivatives(lab, path, strategy):
    from torch.autograd import forward_ad

    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    x, tangent = lab.batch(), lab.batch(step=1)

    def derivative(m):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, tangent))).tangent

    torch.testing.assert_close(derivative(model), derivative(reference), **lab.CLOSE)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    units = lab.units(model)
    assert {unit.training_state for unit in units} == {TrainingState.IDLE}
    assert not any(unit.handle.unsharded for unit in units)
    if path != "flat":
        lab.assert_grads(model, reference)


# ---------------------------------------------------------------------------------------- units used in part or again


@pytest.mark.world(2)
@pytest.mark.covers("B136")
def test_a_list_of_modules_is_no_unit(lab):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(TypeError, match="fully_shard: expected one module, got a list"):
        fully_shard([a, b])
    with pytest.raises(TypeError, match="replicate: expected one module, got a list"):
        replicate([a, b])
    with pytest.raises(TypeError, match="FullyShardedDataParallel: expected one module, got a list"):
        FSDP([a, b])
    fully_shard(a)  # what was refused left no mark
    replicate(b)
