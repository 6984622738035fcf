"""Models with buffers, with parts that get no gradient, and with outputs other than one fresh tensor."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import (
    ASKED_ALONE,
    Family,
    Inputs,
    MakeInput,
    Wired,
    chain,
    features,
    float_input,
    generator,
    layers,
    tensors_in,
)
from fsdp_testing.cases.models.plain import square
from fsdp_testing.cases.models.tree_layers import pack

ZOO = Family()

# -------------------------------------------------------------------------------------------------------- buffers


class Shifted(nn.Module):
    """A layer with an unsaved floating-point buffer, a saved one that is halved in training, and a counter of that."""

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
            self.offset.mul_(0.5)  # exact in every dtype
        own = self.get_buffer(self._own)
        return self.linear(x + self.offset.to(x.dtype)) * torch.cos(own.to(x.dtype))


class TableOnly(nn.Module):
    """Buffers and no parameter; one of them is boolean, and both change in training."""

    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, generator=generator(3)))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mask.copy_(self.mask.roll(1))
            self.table.mul_(0.5)
        # Copies: a later forward changes the buffers in place, and autograd must not see that.
        return torch.where(self.mask.clone(), x, x * self.table.clone().to(x.dtype))


@ZOO.model("buffers", float_input(5), ("first", "second", "plain"), "buffers uneven", "buffers")
def buffers() -> nn.Module:
    """Saved and unsaved, floating-point, integer and boolean buffers, with equal and with distinct names."""
    return Wired(
        lambda m, x: m.second(torch.tanh(m.first(m.plain(x)))),
        first=Shifted("alpha", 1),
        second=Shifted("beta", 2),
        plain=TableOnly(),
    )


@ZOO.model("batch_norm", float_input(5), ("first", "second"), "buffers rank_local_buffers uneven", "buffers")
def batch_norm() -> nn.Module:
    """Batch statistics: buffers that each rank computes from its own inputs."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        # An empty batch has no statistics and torch refuses it, so the layer is skipped.
        hidden = m.first(x)
        return m.second(torch.tanh(m.norm(hidden) if len(x) > 1 or not m.training else hidden))

    return Wired(flow, first=nn.Linear(5, 6), norm=nn.BatchNorm1d(6), second=nn.Linear(6, 5))


# ------------------------------------------------------------------------------------- parts without a gradient


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


def _adapted(*frozen: str) -> nn.Module:
    model = Wired(
        lambda m, x: m.head(m.body(torch.tanh(m.stem(x)))),
        stem=square(6),
        body=layers(square(6), square(6)),
        head=square(6),
    )
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


@ZOO.model("frozen_body", float_input(6), ("stem", "body", "head"), "frozen", "frozen_parameters")
def frozen_body() -> nn.Module:
    """A frozen unit behind a trainable one, so that gradients pass through it."""
    return _adapted("body")


@ZOO.model("frozen_stem", float_input(6), ("stem", "body", "head"), "frozen", "frozen_parameters")
def frozen_stem() -> nn.Module:
    """The first units are frozen: nothing that enters them needs a gradient."""
    return _adapted("stem", "body")


@ZOO.model(
    "frozen_bias",
    float_input(5),
    ("layers.0", "layers.1", "layers.2"),
    "frozen uneven",
    "frozen_parameters frozen_mixed_unit",
)
def frozen_bias() -> nn.Module:
    """Trainable and frozen parameters inside one unit."""
    made = [square(5) for _ in range(3)]
    for layer in made:
        layer.bias.requires_grad_(False)
    return layers(*made)


@ZOO.model(
    "conditional",
    _with_use(6, (True, False, True)),
    ("trunk", "branches.0", "branches.1", "branches.2", "never"),
    "unused conditional",
    "unused_parameters",
    input_options={"use": ((True, False, True), (True, True, True), (False, True, False), (False, False, False))},
)
def conditional() -> nn.Module:
    """Units that run or not, depending on the input, and one that never runs."""

    def flow(m: Any, x: torch.Tensor, use: tuple[bool, ...]) -> torch.Tensor:
        x = torch.tanh(m.trunk(x))
        for branch, used in zip(m.branches, use):
            if used:
                x = x + torch.tanh(branch(x))
        return x

    branches = nn.ModuleList(square(6) for _ in range(3))
    return Wired(flow, trunk=square(6), branches=branches, never=square(6))


class Gated(nn.Module):
    """A layer with an optional correction, weighted so that its gradient is not that of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(x) + 0.5 * self.sometimes(x) if use else self.always(x)


@ZOO.model(
    "partly_used",
    _with_use(5, (True, False)),
    ("first", "second"),
    "unused conditional uneven",
    "unused_parameters",
    input_options={"use": ((True, False), (True, True), (False, True), (False, False))},
)
def partly_used() -> nn.Module:
    """Units that always run, with parameters that are used or not."""
    flow = lambda m, x, use: m.second(torch.tanh(m.first(x, use[0])), use[1])
    return Wired(flow, first=Gated(), second=Gated())


@ZOO.model("unused_output", float_input(6), ("kept", "dropped", "last"), "unused", "unused_parameters")
def unused_output() -> nn.Module:
    """A unit whose output the loss does not see."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(m.kept(x))
        m.dropped(x)
        return m.last(x)

    return Wired(flow, kept=square(6), dropped=square(6), last=square(6))


# -------------------------------------------------------------------------------------------------------- outputs


@ZOO.model(
    "containers",
    float_input(5),
    ("stem", "heads", "last"),
    "containers uneven",
    "container_outputs",
    arguments={"container": ("tuple", "list", "dict", "nested", "named_tuple", "dataclass")},
)
def containers(container: str = "tuple") -> nn.Module:
    """Units and model return tensors in a container."""

    def two(m: Any, x: torch.Tensor) -> Any:
        return pack(container, m.mean(x), torch.tanh(m.spread(x)))

    def flow(m: Any, x: torch.Tensor) -> Any:
        # What comes before a unit makes its weights take part in the backward pass.
        mean, spread = tensors_in(m.heads(torch.tanh(m.stem(x))))
        return pack(container, m.last(mean), spread * mean)

    return Wired(flow, stem=square(5), heads=Wired(two, mean=square(5), spread=square(5)), last=square(5))


@ZOO.model("opaque_output", float_input(5), ("stem", "heads", "last"), "containers uneven", "opaque_outputs")
def opaque_output() -> nn.Module:
    """Units and model return tensors inside an object of a class of their own."""
    return containers("opaque")


@ZOO.model("returned_parameters", float_input(5), ("stem", "table", "last"), "uneven", "parameter_outputs")
def returned_parameters() -> nn.Module:
    """A unit that returns its parameter and a part of it, which are used outside the unit."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(m.stem(x))
        weight, row = m.table()
        return m.last(torch.tanh(x @ weight.T + row))

    table = Wired(lambda m: (m.weight, m.weight[1:2]), weight=nn.Parameter(torch.empty(5, 5)))
    return Wired(flow, stem=square(5), table=table, last=square(5))


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
        """Return what forward kept, once. It is a method because an attribute set through a wrapper may stay on the wrapper."""
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
def cached_intermediate(*, bypass: bool = True) -> nn.Module:
    """The loss reaches a unit through a tensor that it kept, not through its output."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        returned = m.unit(torch.tanh(m.stem(x)))
        kept = m.unit.take()
        if kept is None:
            raise RuntimeError("the unit kept nothing")
        return m.last(kept if bypass else kept + returned)

    return Wired(flow, stem=square(6), unit=Remembering(), last=square(6))


class Coder(nn.Module):
    """Computes in two methods, neither of which is forward."""

    forward_methods = ("encode", "decode")

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = square(6), square(6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(self.inner(x)))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


@ZOO.model("methods", float_input(6), ("stem", "coder", "last"), "methods", "forward_methods")
def methods() -> nn.Module:
    """A unit whose methods are called instead of its forward, twice in one forward of the model."""
    return Wired(
        lambda m, x: m.last(m.coder.decode(m.coder.encode(torch.tanh(m.stem(x))))),
        stem=square(6),
        coder=Coder(),
        last=square(6),
    )


@ZOO.model("view_output", float_input(6), ("stem", "unit", "last"), "view_output", "inplace_on_output")
def view_output() -> nn.Module:
    """A unit returns a view that its caller changes in place."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.unit(torch.tanh(m.stem(x)))
        y += x
        return m.last(torch.tanh(y))

    viewed = Wired(lambda m, x: m.outer(torch.tanh(m.inner(x)))[:, :6], inner=nn.Linear(6, 12), outer=square(12))
    return Wired(flow, stem=square(6), unit=viewed, last=square(6))


class Hooked(nn.Linear):
    """A layer with hooks of the user's that read its weights: one changes the input, the other the output."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_forward_pre_hook(lambda layer, args: (args[0] * (1 + layer.weight.mean()),))
        self.register_forward_hook(lambda layer, args, output: output + args[0] * layer.bias)


@ZOO.model("hooked", float_input(7), ("layers.0", "layers.1"), "uneven")
def hooked() -> nn.Module:
    """Units with hooks of the user's, registered before they are units, and a third of them in the root."""
    return layers(Hooked(7), Hooked(7), Hooked(7))


def _by_the_weight(layer: Any, outputs: Any) -> Any:
    return (outputs[0] * (1 + layer.weight.detach().mean()),)


def _with_a_part_of_the_output(_layer: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] + 0.25 * outputs[0],)


class BackwardHooked(nn.Linear):
    """A layer with backward hooks of the user's: one changes the gradient of the output, the other that of the input."""

    def __init__(self, width: int, reads_weight: bool) -> None:
        super().__init__(width, width)
        if reads_weight:
            self.register_full_backward_pre_hook(_by_the_weight)
        self.register_full_backward_hook(_with_a_part_of_the_output)


@ZOO.model("backward_hooked", float_input(7), ("layers.0", "layers.1"), f"{ASKED_ALONE} uneven")
def backward_hooked(reads_weight: bool = False) -> nn.Module:
    """A unit, and a layer of the root, with backward hooks of the user's; if asked, one of them reads the weight."""
    # The first layer has none: torch warns of hooks on modules whose inputs get no gradient.
    return layers(square(7), *(BackwardHooked(7, reads_weight) for _ in range(2)))


@ZOO.model("weight_norm", float_input(6), ("first", "last"), ASKED_ALONE)
def weight_norm() -> nn.Module:
    """Units whose weights torch computes from two parameters each, by its parametrization."""
    normed = torch.nn.utils.parametrizations.weight_norm
    return chain("first middle last", **{name: normed(nn.Linear(6, 6)) for name in ("first", "middle", "last")})


@ZOO.model("autocast", float_input(8), ("first", "last"), f"{ASKED_ALONE} autocast")
def autocast() -> nn.Module:
    """Units that compute in bfloat16 because the caller asks torch's autocast for it; parameters keep their dtype."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            hidden = m.last(torch.tanh(m.middle(torch.tanh(m.first(x)))))
        return hidden.to(x.dtype)

    return Wired(flow, **{name: nn.Linear(8, 8) for name in ("first", "middle", "last")})
