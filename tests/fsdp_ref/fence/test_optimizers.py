"""Optimizers that need whole parameters are refused shards, and step what is whole as in one process."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ref.errors import UnsupportedError


def stepped(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters after two steps on one batch that all ranks have."""
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optim.step(closure)
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("kind", [Adafactor, LBFGS, Muon])
@pytest.mark.world(2)
def test_shards_are_refused_and_whole_parameters_stepped(world, trial, api, strategy, kind):
    model = trial(api, strategy, lambda: nn.Linear(6, 6, bias=False, dtype=torch.float64)).model
    plain = nn.Linear(6, 6, bias=False, dtype=torch.float64)
    copied = copy.deepcopy(model)
    whole = strategy == "NO_SHARD"
    for sharded in (model, copied):
        if kind is Muon and (not whole or api == "flat"):
            with pytest.raises(ValueError, match="only supports 2D"):
                Muon(sharded.parameters())
            continue
        optim = kind(sharded.parameters(), lr=0.05)
        if whole and (kind is LBFGS or api != "flat"):
            with torch.no_grad():
                plain.weight.copy_(next(sharded.parameters()).view(6, 6))
            same = stepped(plain, kind(plain.parameters(), lr=0.05))
            torch.testing.assert_close(stepped(sharded, optim)[0].view(6, 6), same[0], rtol=0, atol=1e-12)
        else:
            with pytest.raises(UnsupportedError, match=rf"{kind.__name__}\.step over parameters sharded by fsdp_ref"):
                stepped(sharded, optim)
    AdamW(model.parameters()).step()


class ByNorm(Optimizer):
    """Moves each parameter by its own norm; the settings are an argument that torch's optimizers do not have."""

    def __init__(self, params, lr=0.0, *, trust=1.0):
        super().__init__(params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(group, param)

    def move(self, group, param):
        param.sub_(param.grad / param.grad.norm(), alpha=group["lr"] * group["trust"])


class ByElement(ByNorm):
    def move(self, group, param):
        param.sub_(param.grad, alpha=group["lr"] * group["trust"])


class Noisy(ByNorm):
    def move(self, group, param):
        param.sub_(param.grad + 0.1 * torch.randn_like(param), alpha=group["lr"])


class WantsMore(ByElement):
    def __init__(self, params, model):
        super().__init__(params, 0.1)


@pytest.mark.parametrize(
    ("make", "refused", "warned"),
    [
        (lambda model: ByNorm(model.parameters(), trust=0.5), True, ""),
        (lambda model: ByElement(model.parameters(), trust=0.5), False, ""),
        (lambda model: Noisy(model.parameters(), 0.1), False, "Noisy steps each element by itself .it draws random"),
        (lambda model: WantsMore(model.parameters(), model), False, "WantsMore steps each .* missing 1 required"),
    ],
)
@pytest.mark.world(2)
def test_an_optimizer_that_is_not_torchs_is_tried_before_it_steps_shards(world, trial, api, make, refused, warned):
    model = trial(api, "FULL_SHARD", lambda: nn.Linear(6, 6, dtype=torch.float64)).model
    optim, steps = make(model), []
    handle = register_optimizer_step_pre_hook(lambda one, *_: steps.append(one))
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            if refused:
                with pytest.raises(UnsupportedError, match=r"ByNorm\.step over parameters sharded by fsdp_ref"):
                    optim.step()
            else:
                optim.step()
    handle.remove()
    said = [str(one.message) for one in told if "fsdp_ref" in str(one.message)]
    assert len(said) == bool(warned)
    assert all(re.search(warned, one) for one in said)
    assert {*steps} <= {optim}, "hooks of others see no step of a trial"
    assert torch.equal(state, torch.get_rng_state())
    plain = nn.Linear(3, 3)
    ByNorm(plain.parameters()).step()
