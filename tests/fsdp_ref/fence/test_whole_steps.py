"""Optimizers that need whole parameters are refused shards, and step what is whole as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, AdamW, Muon

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
