"""Models that return something other than one fresh tensor."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import Family, float_input, tensors_in
from fsdp_testing.cases.models.tree_layers import Named, Opaque, Record

ZOO = Family()
_CONTAINERS = ("tuple", "list", "dict", "nested", "named_tuple", "dataclass")


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


class TwoHeads(nn.Module):
    """A unit that returns two tensors in a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.mean = nn.Linear(5, 5)
        self.spread = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return pack(self.container, self.mean(x), torch.tanh(self.spread(x)))


@ZOO.model(
    "containers",
    float_input(5),
    ("stem", "heads", "last"),
    "containers uneven",
    "container_outputs",
    arguments={"container": _CONTAINERS},
)
class Containers(nn.Module):
    """Units and model return tensors in a container."""

    def __init__(self, container: str = "tuple") -> None:
        super().__init__()
        self.container = container
        self.stem = nn.Linear(5, 5)
        self.heads = TwoHeads(container)
        self.last = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        # What comes before a unit makes its weights take part in the backward pass.
        mean, spread = tensors_in(self.heads(torch.tanh(self.stem(x))))
        return pack(self.container, self.last(mean), spread * mean)


@ZOO.model("opaque_output", float_input(5), ("stem", "heads", "last"), "containers uneven", "opaque_outputs")
def opaque_output() -> nn.Module:
    """Units and model return tensors inside an object of a class of their own."""
    return Containers("opaque")


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
        """Return what forward kept, once. A method: an attribute that is set through a wrapper may stay on the wrapper."""
        kept, self.hidden = self.hidden, None  # else the graph of this step would live until the next
        return kept


@ZOO.model(
    "cached_intermediate",
    float_input(6),
    ("stem", "unit", "last"),
    "bypass",
    "loss_bypasses_output",
    arguments={"bypass": (True, False)},
)
class CachedIntermediate(nn.Module):
    """The loss reaches a unit through a tensor that it kept, not through its output."""

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


@ZOO.model("view_output", float_input(6), ("stem", "unit", "last"), "view_output", "inplace_on_output")
class ViewThenInPlace(nn.Module):
    """A unit returns a view that its caller changes in place."""

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
