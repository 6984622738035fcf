"""Models that use something more than once: a parameter, a module, a call."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

import torch
from torch import nn

from fsdp_testing.zoo.model import ZooModel, float_input


class TiedPair(nn.Module):
    """Two layers whose weights are one parameter."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedWithin(nn.Module):
    """Tied pairs, each of which is one unit, and a free layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = TiedPair()
        self.free = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(torch.tanh(self.pair(x)))


class TiedAcross(nn.Module):
    """The first and the last layer share their weight; both are units, and a unit lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class CalledTwice(nn.Module):
    """One layer is called twice in a forward, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(7, 7)
        self.between = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.between(torch.tanh(self.again(x)))))


class RegisteredTwice(nn.Module):
    """One module under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.other = nn.Linear(7, 7)
        self.alias = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alias(torch.tanh(self.other(torch.tanh(self.layer(x)))))


MODELS = (
    ZooModel(
        "tied_within",
        "One parameter under two names inside one unit.",
        TiedWithin,
        float_input(5),
        ("pair", "free"),
        frozenset({"tied", "uneven"}),
        frozenset({"shared_parameters"}),
    ),
    ZooModel(
        "tied_across",
        "One parameter in two units.",
        TiedAcross,
        float_input(5),
        ("first", "middle", "last"),
        frozenset({"tied", "uneven"}),
        frozenset({"shared_parameters", "shared_across_units"}),
    ),
    ZooModel(
        "called_twice",
        "A unit that runs twice in one forward.",
        CalledTwice,
        float_input(7),
        ("again", "between"),
        frozenset({"reused_module", "uneven"}),
        frozenset({"reused_modules"}),
    ),
    ZooModel(
        "registered_twice",
        "A unit under two names.",
        RegisteredTwice,
        float_input(7),
        ("layer", "other"),
        frozenset({"reused_module", "tied", "uneven"}),
        frozenset({"shared_parameters", "reused_modules"}),
    ),
)
