"""Outputs that are objects of the user's own class, which no hook can look into."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp_ref import ShardingStrategy
from fsdp_ref.errors import FsdpRuntimeError

S = ShardingStrategy
HOOKS = {
    "none": nullcontext,
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "save_on_cpu": save_on_cpu,
}


class Result:
    def __init__(self, value):
        self.value = value


class Part(nn.Module):
    again = False

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.one(x)
        return Result(checkpoint(self.two, x, use_reentrant=False) if self.again else self.two(x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.part = nn.Linear(3, 3), Part()

    def forward(self, x):
        return self.part(self.inp(x).tanh())


def loss(model, x):
    return model(x).value.square().mean()


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
@pytest.mark.parametrize("hooks", HOOKS)
def test_under_any_saved_tensor_hooks(lab, orig_path, strategy, hooks):
    reference = lab.make(Whole)
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={Part}, sharding_strategy=strategy)
    ours, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(2):
        with HOOKS[hooks]():
            value = loss(model, lab.batch(step))
        value.backward()
        ours.step()
        ours.zero_grad()
        lab.reference_step(reference, lab.batches(step), loss, plain)
        lab.assert_params(model, reference)
    assert not any(unit.handle.unsharded for unit in lab.units(model))


@pytest.mark.world(2)
def test_with_checkpointing_the_advice_applies(lab, orig_path):
    plain = lab.make(Whole)
    plain.part.again = True
    model = lab.shard(plain, orig_path, policy={Part})
    with pytest.raises(FsdpRuntimeError, match="Return tensors from forward") as info:
        loss(model, lab.batch()).backward()
    assert "two.weight" in str(info.value)
    assert "register_fsdp_forward_method" not in str(info.value)
