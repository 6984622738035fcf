"""State of models that every rank holds whole goes back where it was, by original name."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fsdp_testing.adapters.shared import replicated
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules, checkpoint_outside
from fsdp_testing.cases.models import MODELS


def trained(seed, optimizer=torch.optim.AdamW):
    model = MODELS["mlp"].build(seed)
    steps = optimizer(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    steps.step()
    return model, steps


def test_a_model_and_its_optimizer_come_back_under_other_prefixes():
    (model, optimizer), (other, fresh) = trained(0), trained(1)
    checkpoint_modules(other, ("layers.1",))
    fresh.state.clear()
    replicated.load_full_state_dict(other, replicated.full_state_dict(model))
    replicated.load_full_optimizer_state(other, fresh, replicated.full_optimizer_state(model, optimizer))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[two]["exp_avg"])
        assert optimizer.state[one]["exp_avg"] is not fresh.state[two]["exp_avg"]
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1


def test_what_was_saved_is_not_the_live_model():
    model, optimizer = trained(0)
    saved = replicated.full_state_dict(model)
    state = replicated.full_optimizer_state(model, optimizer)
    kept, steps = copy.deepcopy(saved), copy.deepcopy(state)
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert all(torch.equal(saved[fqn], kept[fqn]) for fqn in kept)
    assert state["state"]["layers.0.weight"]["step"] == steps["state"]["layers.0.weight"]["step"] == 1


def test_recomputation_goes_around_the_outermost_module_of_a_name():
    model = MODELS["mlp"].build(0)
    inner = model.get_submodule("layers.1")

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._fsdp_wrapped_module = module

        def forward(self, x):
            return self._fsdp_wrapped_module(x)

    model.layers[1] = Wrapper(inner)
    checkpoint_outside(model, [inner])
    assert isinstance(model.layers[1]._checkpoint_wrapped_module, Wrapper)
