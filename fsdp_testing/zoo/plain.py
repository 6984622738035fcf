"""Models without any trick of sharing or state: depth, sizes, strides, dtypes, and how they take their input."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fsdp_testing.zoo.model import Inputs, ZooModel, features, float_input, tokens


class Mlp(nn.Module):
    """`depth` linear layers with tanh between them."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Level(nn.Module):
    """One level of a nest: its own weights before and after the level below."""

    def __init__(self, depth: int, width: int = 6) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = Level(depth - 1, width) if depth > 1 else nn.Linear(width, width)
        self.after = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


class Uneven(nn.Module):
    """Layers of 1, 2, 3, 5 and 7 features: no size divides by 2, 3 or 4, and some have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (5, 7, 1, 3, 2, 5)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scaled(nn.Module):
    """A linear layer times a parameter of shape `()` (or `(1,)`)."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.temperature = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature.exp()


class ScaledStack(nn.Module):
    """Scaled layers in sequence."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first = Scaled(shape)
        self.second = Scaled(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class WithEmpty(nn.Module):
    """A layer beside a parameter without elements, which takes part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.nothing = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x), x @ self.nothing.T], dim=-1)


class OnlyEmpty(nn.Module):
    """A linear map to nothing: no parameter of it has an element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 6))
        self.bias = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class EmptyStack(nn.Module):
    """Two layers with empty parameters, and one that is an empty parameter only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = WithEmpty()
        self.second = WithEmpty()
        self.only_empty = OnlyEmpty()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return torch.cat([x, self.only_empty(x)], dim=-1)


class Strided(nn.Module):
    """A linear map whose weight is stored transposed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).t())
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class StridedStack(nn.Module):
    """A transposed weight, and a convolution in channels-last memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Strided(18, 18)
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.mix(x)).reshape(-1, 2, 3, 3)
        return self.conv(x).flatten(1)


class Lookup(nn.Module):
    """An embedding of a prime number of rows with a padding row, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5, padding_idx=0)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class TwoDtypes(nn.Module):
    """A layer of the model's dtype, then one of another dtype, each alone in its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.wide(x))
        return self.narrow(x.to(self.narrow.weight.dtype)).to(x.dtype)


class KeywordOnly(nn.Module):
    """Takes a nested container by keyword, passes keywords on, and has a part that is called without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Keyword(6)
        self.offset = Offset(6)

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


class Offset(nn.Module):
    """A module without inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(width))

    def forward(self) -> torch.Tensor:
        return self.value.sin()


class BareRoot(nn.Module):
    """No parameter of its own, a part without any parameter, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.activation = nn.Tanh()
        self.second = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x)))


def _token_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    del dtype  # ids have none
    return Inputs((tokens(seed, rank, step, (batch, 3), 13),), {})


def _keyword_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    left, right = features(seed, rank, step, (2, batch, 6), dtype).unbind(0)
    return Inputs((), {"batch": {"left": left, "pair": (right,), "gain": 0.5}})


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    module.get_submodule("narrow").to(other)


MODELS = (
    ZooModel("mlp", "Three equal layers.", Mlp, float_input(8), ("layers.0", "layers.1", "layers.2")),
    ZooModel(
        "deep_nest",
        "Four modules inside each other, weights on every level.",
        lambda: Level(4),
        float_input(6),
        ("inner", "inner.inner", "inner.inner.inner"),
        frozenset({"nested"}),
    ),
    ZooModel(
        "uneven",
        "Sizes that divide by no number of ranks, some smaller than it.",
        Uneven,
        float_input(5),
        ("layers.0", "layers.1", "layers.2", "layers.3", "layers.4"),
        frozenset({"uneven"}),
    ),
    ZooModel(
        "scalars",
        "Parameters of shape () beside ordinary ones.",
        ScaledStack,
        float_input(5),
        ("first", "second"),
        frozenset({"zero_dim", "uneven"}),
        frozenset({"zero_dim_parameters"}),
    ),
    ZooModel(
        "one_element",
        "Parameters of shape (1,) beside ordinary ones.",
        lambda: ScaledStack((1,)),
        float_input(5),
        ("first", "second"),
        frozenset({"uneven"}),
    ),
    ZooModel(
        "empty_parameters",
        "Parameters without elements, alone in a layer and beside others.",
        EmptyStack,
        float_input(6),
        ("first", "second", "only_empty"),
        frozenset({"empty"}),
        frozenset({"empty_parameters"}),
    ),
    ZooModel(
        "strided",
        "Parameters that are not contiguous: transposed, channels last.",
        StridedStack,
        float_input(18),
        ("mix", "conv"),
        frozenset({"strided", "uneven"}),
        frozenset({"strided_parameters"}),
    ),
    ZooModel(
        "embedding",
        "An embedding with a padding row; integer inputs.",
        Lookup,
        _token_input,
        ("embed", "head"),
        frozenset({"integer_input", "uneven"}),
    ),
    ZooModel(
        "two_dtypes",
        "Units of different dtypes in one model.",
        TwoDtypes,
        float_input(6),
        ("wide", "narrow"),
        frozenset({"mixed_dtypes"}),
        finish=_narrow,
    ),
    ZooModel(
        "keywords",
        "Keyword-only nested inputs, and a unit that is called without arguments.",
        KeywordOnly,
        _keyword_input,
        ("linear", "offset"),
        frozenset({"keyword_input"}),
    ),
    ZooModel(
        "bare_root",
        "A root without own parameters, and a unit without any.",
        BareRoot,
        float_input(7),
        ("first", "activation", "second"),
        frozenset({"bare_root", "uneven"}),
    ),
)
