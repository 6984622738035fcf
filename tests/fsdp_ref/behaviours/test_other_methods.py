"""Methods other than forward: registered they run as forward does, and unregistered they leave no gradient behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsdp_ref
from fsdp_ref import ShardingStrategy
from fsdp_ref.composable import register_fsdp_forward_method
from fsdp_ref.errors import FsdpRuntimeError

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
STRATEGIES = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def encode(self, x, *, scale=1.0):
        return self.first(x).tanh() * scale

    def forward(self, x):
        return self.second(self.encode(x))


def loss(model, x):
    return model.encode(x, scale=2.0).square().mean() + model(x).square().mean()


@quiet
@STRATEGIES
@pytest.mark.world([2, 3])
def test_registered_methods_train(lab, path, strategy):
    reference = lab.make(Coder)
    model = lab.shard(copy.deepcopy(reference), path, policy={nn.Linear}, sharding_strategy=strategy)
    register_fsdp_forward_method(model, "encode")
    for trained in (model, copy.deepcopy(model)):
        plain = copy.deepcopy(reference)
        optims = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (trained, plain)]
        for step in range(2):
            loss(trained, lab.batch(step)).backward()
            lab.reference_step(plain, lab.batches(step), loss)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            lab.assert_params(trained, plain)
    lab.assert_params(model, plain)


@pytest.mark.world(2)
def test_what_can_be_registered(lab, path):
    model = lab.shard(lab.make(Coder), path)
    with pytest.raises(ValueError, match="expected a method of Coder, got 'encoder'"):
        register_fsdp_forward_method(model, "encoder")
    plain = Coder()
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    assert fsdp_ref.register_fsdp_forward_method is register_fsdp_forward_method


@quiet
@STRATEGIES
@pytest.mark.world([2, 3])
def test_an_unregistered_method_leaves_no_local_gradient(lab, orig_path, strategy):
    model = lab.shard(lab.make(Coder), orig_path, sharding_strategy=strategy)
    with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
        model.encode(lab.batch()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.world(2)
def test_an_unregistered_method_is_named_with_what_is_sharded(lab, path):
    model = lab.shard(lab.make(Coder), path)
    x = lab.batch()
    said = r"Coder.encode: expected full.* got sharded ones: first.weight, first.bias. Call .*\(module, 'encode'\)"
    for each in (model, copy.deepcopy(model)):
        for called in (lambda m=each: m.encode(x), lambda m=each: loss(m, x)):
            with pytest.raises(FsdpRuntimeError, match=said):
                called()
        with pytest.raises(
            FsdpRuntimeError, match=r"Coder.forward of a module inside: .* got sharded ones: second.weight"
        ):
            each.second(x[:, :1].expand(-1, 4))
        with lab.full(each):
            assert each.encode(x).shape == (2, 4)
        each(x).sum().backward()


@quiet
@STRATEGIES
@pytest.mark.world(2)
def test_a_shard_that_happens_to_fit_is_noticed(lab, path, strategy):
    """Two ranks have one row each of a layer: torch takes a vector for a weight, and nothing fails in forward."""
    model = lab.shard(lab.make(lambda: nn.Sequential(nn.Linear(4, 2, bias=False))), path, sharding_strategy=strategy)
    param = next(model.parameters())
    x = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected one that comes through the forward of its unit"):
        (x @ param.reshape(-1, 4).T).sum().backward()


@quiet
@STRATEGIES
@pytest.mark.world(2)
def test_frozen_and_replaced_parameters_are_guarded_too(lab, orig_path, strategy):
    model = lab.shard(lab.make(Coder).requires_grad_(False), orig_path, sharding_strategy=strategy)
    model.requires_grad_(True)
    inner = getattr(model, "module", model)
    inner.first.bias = nn.Parameter(inner.first.bias.detach().clone())
    model(lab.batch())
    for p in model.parameters():
        with pytest.raises(RuntimeError, match="expected one that comes through the forward of its unit"):
            p.sum().backward()
    x = lab.batch()
    (model(x).sum() + 0).backward()
    seen = []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(grad.shape))
    model(x).sum().backward()
    assert seen == [p.shape for p in Coder().parameters()]
    with lab.full(model), pytest.raises(RuntimeError, match="expected one that comes through the forward of its unit"):
        sum(p.sum() for p in model.parameters()).backward()
