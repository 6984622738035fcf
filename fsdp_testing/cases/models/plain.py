"""Models without any trick of sharing or state: depth, sizes, strides, dtypes, and how they take their input."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import Chain, Family, Inputs, features, float_input, tokens
from fsdp_testing.cases.models.tree_layers import TreeLinear, TreeOffset

ZOO = Family()


def _token_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    del dtype  # ids have none
    return Inputs((tokens(seed, rank, step, (batch, 3), 13),), {})


def _keyword_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    left, right = features(seed, rank, step, (2, batch, 6), dtype).unbind(0)
    return Inputs((), {"batch": {"left": left, "pair": (right,), "gain": 0.5}})


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    module.get_submodule("narrow").to(other)


class Layers(nn.Module):
    """Linear layers of the given sizes, with tanh after each."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@ZOO.model("mlp", float_input(8), ("layers.0", "layers.1", "layers.2"), elementwise_before=("layers.1", "layers.2"))
def mlp() -> nn.Module:
    """Three equal layers."""
    return Layers(8, 8, 8, 8)


class Clipped(nn.Linear):
    """A layer that keeps its weights small by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@ZOO.model("self_clipping", float_input(8), ("layers.0", "layers.1", "layers.2"), needs="forward_edits")
def self_clipping() -> nn.Module:
    """Layers that change their own weights in forward, on all ranks alike."""
    model = Layers(8, 8, 8, 8)
    model.layers = nn.ModuleList(Clipped(8, 8) for _ in range(3))
    return model


class Level(nn.Module):
    """One level of a nest: its own weights before and after the level below."""

    def __init__(self, depth: int, width: int = 6) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = Level(depth - 1, width) if depth > 1 else nn.Linear(width, width)
        self.after = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


@ZOO.model("deep_nest", float_input(6), ("inner", "inner.inner", "inner.inner.inner"), "nested")
def deep_nest() -> nn.Module:
    """Four modules inside each other, weights on every level."""
    return Level(4)


@ZOO.model("uneven", float_input(5), tuple(f"layers.{index}" for index in range(5)), "uneven")
def uneven() -> nn.Module:
    """Sizes that divide by no number of ranks, some smaller than it."""
    return Layers(5, 7, 1, 3, 2, 5)


class Scaled(nn.Module):
    """A linear layer times a parameter of shape `()` (or `(1,)`)."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.temperature = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature.exp()


@ZOO.model("scalars", float_input(5), ("first", "second"), "zero_dim uneven", "zero_dim_parameters")
def scalars(shape: tuple[int, ...] = ()) -> nn.Module:
    """Parameters of shape () beside ordinary ones."""
    return Chain("first second", first=Scaled(shape), second=Scaled(shape))


@ZOO.model("one_element", float_input(5), ("first", "second"), "uneven")
def one_element() -> nn.Module:
    """Parameters of shape (1,) beside ordinary ones."""
    return scalars((1,))


class WithEmpty(nn.Module):
    """A layer beside a parameter without elements, which takes part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.nothing = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x), x @ self.nothing.T], dim=-1)


@ZOO.model("empty_parameters", float_input(6), ("first", "second", "only_empty"), "empty", "empty_parameters")
class EmptyStack(nn.Module):
    """Parameters without elements, alone in a layer and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = WithEmpty()
        self.second = WithEmpty()
        self.only_empty = TreeLinear(6, 0, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return torch.cat([x, self.only_empty(x)], dim=-1)


@ZOO.model("strided", float_input(18), ("mix", "conv"), "strided uneven", "strided_parameters")
class StridedStack(nn.Module):
    """Parameters that are not contiguous: transposed, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = TreeLinear(18, 18, strided=True, act=False)
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.mix(x)).reshape(-1, 2, 3, 3)
        return self.conv(x).flatten(1)


@ZOO.model("embedding", _token_input, ("embed", "head"), "integer_input uneven")
def embedding() -> nn.Module:
    """An embedding with a padding row; integer inputs."""
    return Chain("embed head", embed=nn.Embedding(13, 5, padding_idx=0), head=nn.Linear(5, 3))


@ZOO.model("two_dtypes", float_input(6), ("wide", "narrow"), "mixed_dtypes", finish=_narrow)
class TwoDtypes(nn.Module):
    """Units of different dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.wide(x))
        return self.narrow(x.to(self.narrow.weight.dtype)).to(x.dtype)


@ZOO.model("keywords", _keyword_input, ("linear", "offset"), "keyword_input")
class KeywordOnly(nn.Module):
    """Keyword-only nested inputs, and a unit that is called without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Keyword(6)
        self.offset = TreeOffset(6)

    def forward(self, *, batch: dict[str, Any]) -> torch.Tensor:
        left, (right,) = batch["left"], batch["pair"]
        return torch.tanh(self.linear(x=left, gain=batch["gain"]) + right + self.offset())


class Keyword(nn.Module):
    """A linear layer called by keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, *, x: torch.Tensor, gain: float) -> torch.Tensor:
        return self.inner(x) * gain


@ZOO.model("bare_root", float_input(7), ("first", "activation", "second"), "bare_root uneven")
def bare_root() -> nn.Module:
    """A root without own parameters, and a unit without any."""
    return nn.Sequential(OrderedDict(first=nn.Linear(7, 7), activation=nn.Tanh(), second=nn.Linear(7, 7)))
