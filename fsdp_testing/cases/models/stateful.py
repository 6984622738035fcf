"""Models with buffers: which are saved, which are not, integers, equal and distinct names, and batch statistics."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

import torch
from torch import nn

from fsdp_testing.cases.models.model import Family, float_input, generator

ZOO = Family()


class Shifted(nn.Module):
    """A layer with a saved and an unsaved floating-point buffer, and a counter of its training forwards."""

    offset: torch.Tensor
    count: torch.Tensor

    def __init__(self, name: str, key: int) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self._own = name
        draw = generator(key)
        self.register_buffer("offset", torch.randn(5, generator=draw))
        self.register_buffer(name, torch.randn(5, generator=draw), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        own = self.get_buffer(self._own)
        return self.linear(x + self.offset.to(x.dtype)) * torch.cos(own.to(x.dtype))


@ZOO.model("buffers", float_input(5), ("first", "second", "plain"), "buffers uneven", "buffers")
class Buffers(nn.Module):
    """Saved and unsaved, floating-point, integer and boolean buffers, with equal and with distinct names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Shifted("alpha", 1)
        self.second = Shifted("beta", 2)
        self.plain = TableOnly()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.plain(x))))


class TableOnly(nn.Module):
    """Buffers and no parameter; one of them is boolean."""

    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, generator=generator(3)))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, x, x * self.table.to(x.dtype))


@ZOO.model("batch_norm", float_input(5), ("first", "second"), "buffers rank_local_buffers uneven", "buffers")
class Normalised(nn.Module):
    """Batch statistics: buffers that each rank computes from its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # An empty batch has no statistics; torch refuses one, so the layer is passed by.
        hidden = self.first(x)
        return self.second(torch.tanh(self.norm(hidden) if len(x) > 1 or not self.training else hidden))
