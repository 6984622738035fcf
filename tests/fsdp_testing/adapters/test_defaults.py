"""Defaults that the completed adapter is made of (the adapter's own tests look at them from outside)."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import torch
from torch import nn

from fsdp_testing.adapters import defaults
from fsdp_testing.adapters.adapter import Adapter


def test_there_is_a_default_for_every_callable_field_but_wrap():
    class Bare:
        name = "bare"

    fields = {f.name for f in dataclasses.fields(Adapter)}
    data = {"name", "capabilities", "source", "observes_locally", "observes_gradients", "missing", "wrap"}
    data |= {"step_clears_gradients", "widest_dtype", "built_on", "reference", "not_beside_tensor_parallel"}
    assert set(defaults.methods(Bare(), {})) == fields - data


def test_torchs_own_clipping_serves_a_model_without_one():
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.grad = torch.tensor([[3.0], [4.0]])
    assert defaults.clip_grad_norm(layer, 1.0, 2.0).item() == 5.0
    assert layer.weight.grad.norm().item() <= 1.0


def test_an_adapter_that_gathers_tells_flags_by_its_named_parameters():
    """Whole tensors are copies: what they require is what the parameters that an optimizer gets require."""
    layer = nn.Linear(1, 2)
    layer.bias.requires_grad_(False)
    gathered = {"full_parameters": lambda model, writeback: nullcontext({n: p.detach() for n, p in _named(model)})}
    held = defaults.methods(object(), gathered)["local_pieces"](layer)
    assert {name: piece.requires_grad for name, (piece,) in held.items()} == {"weight": True, "bias": False}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())
