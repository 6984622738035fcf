"""The layers of which a drawn model is made: one class for each kind of node, and the containers that groups return.

Each is made with the width that enters it and with the fields of its node. It needs torch alone, and its numbers are of
the default dtype: the text of those classes that a model needs is copied into the script of a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    parts: tuple[torch.Tensor, str]


class Opaque:
    """An output that no traversal of containers knows."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.mean, self.spread = mean, spread


class TreeLinear(nn.Module):
    """A linear map, with tanh after it unless `act` is false; in a dtype of its own if one is given."""

    def __init__(
        self,
        width: int,
        out: int,
        bias: bool = True,
        strided: bool = False,
        act: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(width, out, dtype=dtype).t() if strided else torch.empty(out, width, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(out, dtype=dtype)) if bias else None
        self._act, self._casts = act, dtype is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x.to(self.weight.dtype) if self._casts else x, self.weight, self.bias)
        y = torch.tanh(y) if self._act else y
        return y.to(x.dtype) if self._casts else y


class TreeScale(nn.Module):
    """Multiplies by one plus a parameter, whose shape may be (), (1,) or empty."""

    def __init__(self, width: int, shape: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        sizes = {"vector": (width,), "scalar": (), "one": (1,), "empty": (0,)}[shape]
        self.weight = nn.Parameter(torch.empty(sizes, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        # A parameter without elements also takes part: its sum is zero.
        # Bounded, since the module may be called repeatedly on its own output.
        return torch.tanh(x) * (1 + (weight if weight.numel() else weight.sum()))


class TreeNorm(nn.Module):
    """Layer normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One plus the weight keeps the size of activations; a large epsilon keeps the gradient of a constant row tame.
        return functional.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, eps=0.1)


class TreeConv(nn.Module):
    """A one-dimensional convolution along any width; the mean over its channels."""

    def __init__(self, _width: int, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.conv1d(x.unsqueeze(1), self.weight, self.bias, padding=self.weight.shape[-1] // 2)
        return torch.tanh(y).mean(1)


class TreeEmbed(nn.Module):
    """Adds the embedding of each row's token; ids wrap around the number of rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return x + functional.embedding(ids % self.weight.shape[0], self.weight)


class TreeOffset(nn.Module):
    """A module that is called without inputs; its caller adds what it returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self) -> torch.Tensor:
        return torch.sin(self.weight)


class TreeBuffer(nn.Module):
    """Adds a buffer: a constant, a running sum of what this rank has seen in training, or a counter."""

    def __init__(self, width: int, style: str, buffer: str, persistent: bool = True, twin: bool = False) -> None:
        super().__init__()
        self._style, self._name, self._twin = style, buffer, twin
        value = torch.linspace(-0.7, 1.1, width) if style == "constant" else torch.zeros(width)
        value = torch.zeros((), dtype=torch.int64) if style == "counter" else value
        self.register_buffer(buffer, value, persistent=persistent)
        if twin:
            self.register_buffer("twin", torch.full((width,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.get_buffer(self._name)
        x = x - self.get_buffer("twin").to(x.dtype) if self._twin else x
        if self.training and self._style == "running":
            value.mul_(0.5).add_(x.detach().sum(0).to(value.dtype), alpha=0.125)
        if self.training and self._style == "counter":
            value.add_(1)
        # A copy: a later forward changes the buffer in place, and autograd must not see that.
        return x + 0.1 * value.clone().to(x.dtype).tanh()


class TreeDropout(nn.Module):
    """Drops a quarter in training, at any width."""

    def __init__(self, _width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.25, self.training)


def pack(container: str, one: torch.Tensor, other: torch.Tensor) -> Any:
    """Put two tensors into a container."""
    made: dict[str, Any] = {
        "tensor": one,
        "tuple": (one, other),
        "list": [one, None, other],
        "dict": {"one": one, "other": other, "kind": "dict"},
        "nested": {"both": [(one,), {"other": other}]},
        "named_tuple": Named(one, other),
        "dataclass": Record(one, (other, "text")),
        "opaque": Opaque(one, other),
    }
    return made[container]
