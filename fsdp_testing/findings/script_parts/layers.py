"""Of which modules is the model of a script made? Each computes what its namesake of `zoo.tree_modules` computes.

A script takes the text of those classes that its model needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Named(NamedTuple):
    """An output that is a named tuple."""

    mean: torch.Tensor
    spread: torch.Tensor


@dataclass
class Record:
    """An output that is a dataclass."""

    mean: torch.Tensor
    parts: tuple[torch.Tensor | tuple[torch.Tensor, str], ...]


class Opaque:
    """An output that no library of trees knows."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.mean, self.spread = mean, spread


class Linear(nn.Module):
    """A linear map, with tanh after it unless `act` is false."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        strided: bool = False,
        act: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(inputs, outputs, dtype=dtype).t() if strided else torch.empty(outputs, inputs, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return (torch.tanh(y) if self.act else y).to(x.dtype)


class Scale(nn.Module):
    """Multiplies by one plus a parameter, whose shape may be (), (1,) or (0,)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (1 + (self.weight if self.weight.numel() else self.weight.sum()))


class Norm(nn.Module):
    """Layer norm with a weight near one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, eps=0.1)


class Conv(nn.Module):
    """A convolution along the features, averaged over channels."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.conv1d(x.unsqueeze(1), self.weight, self.bias, padding=self.weight.shape[-1] // 2)
        return torch.tanh(y).mean(1)


class Embed(nn.Module):
    """Adds the embedding of each row's id."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + functional.embedding(ids % self.weight.shape[0], self.weight)


class Offset(nn.Module):
    """Gives a vector that depends on nothing but its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self) -> torch.Tensor:
        return torch.sin(self.weight)


class AddBuffer(nn.Module):
    """Adds a buffer, which may count calls or keep a running sum."""

    def __init__(self, style: str, name: str, width: int, persistent: bool, twin: bool = False) -> None:
        super().__init__()
        self.style, self.name = style, name
        constant = torch.full((width,), 0.5 * (style == "constant"))
        value = torch.zeros((), dtype=torch.int64) if style == "counter" else constant
        self.register_buffer(name, value, persistent=persistent)
        if twin:
            self.register_buffer("twin", torch.full((width,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.get_buffer("twin").to(x.dtype) if "twin" in self._buffers else x
        buffer = self.get_buffer(self.name)
        if self.training and self.style == "running":
            buffer.mul_(0.5).add_(x.detach().sum(0).to(buffer.dtype), alpha=0.125)
        if self.training and self.style == "counter":
            buffer.add_(1)
        return x + 0.1 * buffer.clone().to(x.dtype).tanh()
