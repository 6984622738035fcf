"""Models of which a part gets no gradient: frozen parts, and parts that an input does not use."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import Family, Inputs, MakeInput, features, float_input
from fsdp_testing.cases.models.plain import Layers

ZOO = Family()


def _with_use(width: int, default: tuple[bool, ...]) -> MakeInput:
    def make_input(
        seed: int,
        rank: int,
        step: int,
        batch: int,
        dtype: torch.dtype,
        *,
        use: tuple[bool, ...] | None = None,
        **_: Any,
    ) -> Inputs:
        x = features(seed, rank, step, (batch, width), dtype)
        return Inputs((x,), {"use": tuple(default if use is None else use)})

    return make_input


@ZOO.model("frozen_body", float_input(6), ("stem", "body", "head"), "frozen", "frozen_parameters")
class Adapted(nn.Module):
    """A frozen unit behind a trainable one, so that gradients pass through it."""

    def __init__(self, *, frozen_first: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = Layers(6, 6, 6)
        self.head = nn.Linear(6, 6)
        self.body.requires_grad_(False)
        if frozen_first:
            self.stem.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(torch.tanh(self.stem(x))))


@ZOO.model("frozen_stem", float_input(6), ("stem", "body", "head"), "frozen", "frozen_parameters")
def frozen_stem() -> nn.Module:
    """The first units are frozen: nothing that enters them needs a gradient."""
    return Adapted(frozen_first=True)


@ZOO.model(
    "frozen_bias",
    float_input(5),
    ("layers.0", "layers.1", "layers.2"),
    "frozen uneven",
    "frozen_parameters frozen_mixed_unit",
)
def frozen_bias() -> nn.Module:
    """Trainable and frozen parameters inside one unit."""
    model = Layers(5, 5, 5, 5)
    for layer in model.layers:
        layer.get_parameter("bias").requires_grad_(False)
    return model


@ZOO.model(
    "conditional",
    _with_use(6, (True, False, True)),
    ("trunk", "branches.0", "branches.1", "branches.2", "never"),
    "unused conditional",
    "unused_parameters",
    input_options={"use": ((True, False, True), (True, True, True), (False, True, False), (False, False, False))},
)
class Conditional(nn.Module):
    """Units that run or not, as each input says; one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.never = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, use: tuple[bool, ...]) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for branch, used in zip(self.branches, use):
            if used:
                x = x + torch.tanh(branch(x))
        return x


@ZOO.model(
    "partly_used",
    _with_use(5, (True, False)),
    ("first", "second"),
    "unused conditional uneven",
    "unused_parameters",
    input_options={"use": ((True, False), (True, True), (False, True), (False, False))},
)
class PartlyUsed(nn.Module):
    """Units that always run, with parameters inside that are used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Gated()
        self.second = Gated()

    def forward(self, x: torch.Tensor, use: tuple[bool, ...]) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x, use[0])), use[1])


class Gated(nn.Module):
    """A layer with an optional correction, weighted so that its gradient is not that of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(x) + 0.5 * self.sometimes(x) if use else self.always(x)


@ZOO.model("unused_output", float_input(6), ("kept", "dropped", "last"), "unused", "unused_parameters")
class UnusedOutput(nn.Module):
    """A unit whose output the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(6, 6)
        self.dropped = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.kept(x))
        self.dropped(x)
        return self.last(x)
