"""Models that return something other than one fresh tensor."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_testing.zoo.model import ZooModel, float_input, tensors_in


@dataclass
class Record:
    """A dataclass output."""

    mean: torch.Tensor
    parts: tuple[torch.Tensor, str]


class Named(NamedTuple):
    """A named tuple output."""

    mean: torch.Tensor
    spread: torch.Tensor


class Opaque:
    """An object that no container traversal knows."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.mean = mean
        self.spread = spread


def _pack(container: str, mean: torch.Tensor, spread: torch.Tensor) -> Any:
    packed: dict[str, Any] = {
        "tuple": (mean, spread),
        "list": [mean, None, spread],
        "dict": {"mean": mean, "spread": spread, "kind": "dict"},
        "nested": {"both": [(mean,), {"spread": spread}]},
        "named_tuple": Named(mean, spread),
        "dataclass": Record(mean, (spread, "text")),
        "opaque": Opaque(mean, spread),
    }
    return packed[container]


def _unpack(packed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean, spread = tensors_in(packed)
    return mean, spread


class TwoHeads(nn.Module):
    """A unit that returns two tensors in a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.mean = nn.Linear(5, 5)
        self.spread = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return _pack(self.container, self.mean(x), torch.tanh(self.spread(x)))


class Containers(nn.Module):
    """A unit that returns a container, a unit that uses it, and a container as the model's output."""

    def __init__(self, container: str = "tuple") -> None:
        super().__init__()
        self.container = container
        self.stem = nn.Linear(5, 5)
        self.heads = TwoHeads(container)
        self.last = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        # What comes before a unit makes its weights take part in the backward pass.
        mean, spread = _unpack(self.heads(torch.tanh(self.stem(x))))
        return _pack(self.container, self.last(mean), spread * mean)


class Remembering(nn.Module):
    """Keeps an intermediate result on itself."""

    hidden: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.hidden = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.inner(x))
        return torch.tanh(self.outer(self.hidden))

    def take(self) -> torch.Tensor | None:
        """What forward kept, once. A method: an attribute that is set through a wrapper may stay on the wrapper."""
        kept, self.hidden = self.hidden, None  # else the graph of this step would live until the next
        return kept


class CachedIntermediate(nn.Module):
    """The loss sees what a unit kept, besides or instead of what it returned."""

    def __init__(self, *, bypass: bool = True) -> None:
        super().__init__()
        self.bypass = bypass
        self.stem = nn.Linear(6, 6)
        self.unit = Remembering()
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        returned = self.unit(torch.tanh(self.stem(x)))
        kept = self.unit.take()
        if kept is None:
            raise RuntimeError("the unit kept nothing")
        return self.last(kept if self.bypass else kept + returned)


class ViewThenInPlace(nn.Module):
    """A unit returns a view, and the caller changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.unit = ReturnsView()
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.unit(torch.tanh(self.stem(x)))
        y += x
        return self.last(torch.tanh(y))


class ReturnsView(nn.Module):
    """Its output is a view of a tensor that it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.outer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))[:, :6]


CONTAINERS = ("tuple", "list", "dict", "nested", "named_tuple", "dataclass")

MODELS = (
    ZooModel(
        "containers",
        "Units and model return tensors in a container.",
        Containers,
        float_input(5),
        ("stem", "heads", "last"),
        frozenset({"containers", "uneven"}),
        frozenset({"container_outputs"}),
        arguments={"container": CONTAINERS},
    ),
    ZooModel(
        "opaque_output",
        "Units and model return tensors inside an object of a class of their own.",
        lambda: Containers("opaque"),
        float_input(5),
        ("stem", "heads", "last"),
        frozenset({"containers", "uneven"}),
        frozenset({"opaque_outputs"}),
    ),
    ZooModel(
        "cached_intermediate",
        "The loss reaches a unit through a tensor that it kept, not through its output.",
        CachedIntermediate,
        float_input(6),
        ("stem", "unit", "last"),
        frozenset({"bypass"}),
        frozenset({"loss_bypasses_output"}),
        arguments={"bypass": (True, False)},
    ),
    ZooModel(
        "view_output",
        "A unit returns a view that its caller changes in place.",
        ViewThenInPlace,
        float_input(6),
        ("stem", "unit", "last"),
        frozenset({"view_output"}),
        frozenset({"inplace_on_output"}),
    ),
)
