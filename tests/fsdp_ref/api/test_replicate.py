"""A replicated module joins the reduction of every backward that reaches an output, whatever holds that output."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fsdp_ref.composable import replicate


@dataclass
class Output:
    """Hides a tensor from whoever looks into lists and mappings only."""

    value: torch.Tensor


class Branching(nn.Module):
    """Uses its parameter on rank 0 only; elsewhere backward reaches the output and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, use: bool) -> Output:
        return Output(x * self.weight if use else x * 2)


@pytest.mark.world(2)
def test_outputs_in_dataclasses_are_watched(world):
    model = replicate(Branching())
    x = torch.ones(3, requires_grad=True)
    model(x, use=world.rank == 0).value.sum().backward()
    assert model.weight.grad.tolist() == [0.5] * 3
