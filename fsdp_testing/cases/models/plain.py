"""Models whose every part trains: depth, sizes, strides, dtypes, and what is used more than once."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import LARGE, Family, Inputs, Wired, chain, float_input, layers, tokens
from fsdp_testing.cases.models.tree_layers import TreeDropout, TreeLinear

ZOO = Family()
_THREE = ("layers.0", "layers.1", "layers.2")


def _token_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    del dtype  # ids have none
    return Inputs((tokens(seed, rank, step, (batch, 3), 13),), {})


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    module.get_submodule("narrow").to(other)


def square(width: int) -> nn.Linear:
    """Return a layer that keeps the width."""
    return nn.Linear(width, width)


@ZOO.model("mlp", float_input(8), _THREE, elementwise_before=("layers.1", "layers.2"))
def mlp() -> nn.Module:
    """Three equal layers."""
    return layers(square(8), square(8), square(8))


@ZOO.model("wide", float_input(192), ("layers.0", "layers.1"), LARGE)
def wide() -> nn.Module:
    """Two layers of 72 KiB and more per shard on four ranks, in float64: buffers of several pages."""
    return layers(square(192), square(192))


@ZOO.model("huge", float_input(2048), ("layers.0",), LARGE)
def huge() -> nn.Module:
    """One layer of more than 16 MiB in float32: buckets and copies in several parts."""
    return layers(nn.Linear(2048, 2112))


class Clipped(nn.Linear):
    """A layer that limits the size of its own weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@ZOO.model("self_clipping", float_input(8), _THREE, needs="forward_edits")
def self_clipping() -> nn.Module:
    """Layers that change their own weights in forward, on all ranks alike."""
    return layers(Clipped(8, 8), Clipped(8, 8), Clipped(8, 8))


@ZOO.model("strided_clipping", float_input(8), ("layers.0", "layers.1"), needs="forward_edits strided_parameters")
def strided_clipping() -> nn.Module:
    """As `self_clipping`, with transposed weights."""
    made = [Clipped(8, 8), Clipped(8, 8)]
    for layer in made:
        layer.weight = nn.Parameter(layer.weight.detach().t())
    return layers(*made)


class Versioned(nn.Linear):
    """A layer whose first version saved half of its weight, and that doubles what it loads of that version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        key = f"{prefix}weight"
        if (metadata.get("version") or 1) < 2 and key in state:
            state[key] = state[key] * 2.0
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@ZOO.model("versioned", float_input(7), ("block", "block.inner"), "uneven")
def versioned() -> nn.Module:
    """Layers that convert the states of their first version, as layers of libraries do."""
    return chain(
        "block last", block=chain("inner last", inner=Versioned(7, 7), last=Versioned(7, 7)), last=Versioned(7, 3)
    )


class Scaled(nn.Linear):
    """A layer times a factor that is neither parameter nor buffer, as the scales of layers that compute in 8 bits."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]


@ZOO.model("extra_state", float_input(7), ("block", "block.inner"), "uneven")
def extra_state() -> nn.Module:
    """Layers that save more than parameters and buffers."""
    return chain("block last", block=chain("inner last", inner=Scaled(7, 7), last=Scaled(7, 7)), last=Scaled(7, 3))


@ZOO.model("deep_nest", float_input(6), ("inner", "inner.inner", "inner.inner.inner"), "nested")
def deep_nest(depth: int = 4) -> nn.Module:
    """Four modules inside each other, weights on every level."""
    return Wired(
        lambda m, x: x + m.after(torch.tanh(m.inner(torch.tanh(m.before(x))))),
        before=square(6),
        inner=deep_nest(depth - 1) if depth > 1 else square(6),
        after=nn.Linear(6, 6, bias=False),
    )


@ZOO.model("uneven", float_input(5), tuple(f"layers.{index}" for index in range(5)), "uneven")
def uneven() -> nn.Module:
    """Sizes that divide by no number of ranks, some smaller than it."""
    return layers(*(nn.Linear(i, o) for i, o in pairwise((5, 7, 1, 3, 2, 5))))


def _scaled(*shape: int) -> nn.Module:
    temperature = nn.Parameter(torch.ones(shape))
    return Wired(lambda m, x: m.linear(x) * m.temperature.exp(), linear=square(5), temperature=temperature)


@ZOO.model("scalars", float_input(5), ("first", "second"), "zero_dim uneven", "zero_dim_parameters")
def scalars() -> nn.Module:
    """Parameters of shape () beside ordinary ones."""
    return chain("first second", first=_scaled(), second=_scaled())


@ZOO.model("one_element", float_input(5), ("first", "second"), "uneven")
def one_element() -> nn.Module:
    """Parameters of shape (1,) beside ordinary ones."""
    return chain("first second", first=_scaled(1), second=_scaled(1))


def _with_empty() -> nn.Module:
    return Wired(
        lambda m, x: torch.cat([m.linear(x), x @ m.nothing.T], dim=-1),
        linear=square(6),
        nothing=nn.Parameter(torch.empty(0, 6)),
    )


@ZOO.model("empty_parameters", float_input(6), ("first", "second", "only_empty"), "empty", "empty_parameters")
def empty_parameters() -> nn.Module:
    """Parameters without elements, alone in a layer and beside others."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.second(torch.tanh(m.first(x)))
        return torch.cat([x, m.only_empty(x)], dim=-1)

    return Wired(flow, first=_with_empty(), second=_with_empty(), only_empty=TreeLinear(6, 0, act=False))


@ZOO.model("strided", float_input(18), ("mix", "conv"), "strided uneven", "strided_parameters")
def strided() -> nn.Module:
    """Parameters that are not contiguous: transposed, channels last."""
    conv = nn.Conv2d(2, 3, 2)
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations
    return Wired(
        lambda m, x: m.conv(torch.tanh(m.mix(x)).reshape(-1, 2, 3, 3)).flatten(1),
        mix=TreeLinear(18, 18, strided=True, act=False),
        conv=conv,
    )


def _codes(width: int, out: int) -> nn.Module:
    codes = nn.Parameter(torch.zeros(out, width, dtype=torch.int32), requires_grad=False)
    # The remainder tells whole numbers from ones that were rounded to 16 bits on their way.
    return Wired(
        lambda m, x: nn.functional.linear(x, (m.codes % 64).to(x.dtype) * m.scale / 64),
        codes=codes,
        scale=nn.Parameter(torch.ones(out, 1)),
    )


@ZOO.model("quantized", float_input(6), ("first", "last"), "uneven", "integer_parameters frozen_parameters")
def quantized() -> nn.Module:
    """Weights of whole numbers, which do not train, times trained scales."""
    return chain("first last", first=_codes(6, 5), last=_codes(5, 3))


@ZOO.model("embedding", _token_input, ("embed", "head"), "integer_input uneven")
def embedding() -> nn.Module:
    """An embedding with a padding row; integer inputs."""
    return chain("embed head", embed=nn.Embedding(13, 5, padding_idx=0), head=nn.Linear(5, 3))


@ZOO.model("two_dtypes", float_input(6), ("wide", "narrow"), "mixed_dtypes", finish=_narrow)
def two_dtypes(*, narrow_first: bool = False) -> nn.Module:
    """Units of different dtypes in one model, in either order."""

    def flow(m: Any, x: torch.Tensor) -> Any:
        x = torch.tanh(m.wide(x))
        return m.narrow(x.to(m.narrow.weight.dtype)).to(x.dtype)

    units = {name: square(6) for name in (("narrow", "wide") if narrow_first else ("wide", "narrow"))}
    return Wired(flow, **units)


@ZOO.model("inner_modules", float_input(8), ("body", "head", "gain"))
def inner_modules() -> nn.Module:
    """Units of one module each, which have as many outputs as there are ranks, or one element for each."""

    def unit(inner: nn.Module) -> nn.Module:
        return Wired(lambda m, x: m.inner(x), inner=inner)

    body, head, gain = (
        square(8),
        nn.Linear(8, 2, bias=False),
        Wired(lambda m, x: x * m.gain, gain=nn.Parameter(torch.ones(2))),
    )
    return chain("body head gain", body=unit(body), head=unit(head), gain=unit(gain))


@ZOO.model("bare_root", float_input(7), ("first", "activation", "second"), "bare_root uneven")
def bare_root() -> nn.Module:
    """A root without own parameters, and a unit without any."""
    return nn.Sequential(OrderedDict(first=square(7), activation=nn.Tanh(), second=square(7)))


@ZOO.model("tied_within", float_input(5), ("pair", "free"), "tied uneven", "shared_parameters")
def tied_within() -> nn.Module:
    """One parameter under two names inside one unit."""
    first, second = square(5), square(5)
    second.weight = first.weight
    return chain("pair free", pair=chain("first second", first=first, second=second), free=square(5))


@ZOO.model(
    "tied_across",
    float_input(5),
    ("first", "middle", "last"),
    "tied uneven",
    "shared_parameters shared_across_units",
)
def tied_across() -> nn.Module:
    """One parameter in two units."""
    first, last = square(5), nn.Linear(5, 5, bias=False)
    last.weight = first.weight
    return chain("first middle last", first=first, middle=square(5), last=last)


@ZOO.model("called_twice", float_input(7), ("again", "between"), "reused_module uneven", "reused_modules")
def called_twice() -> nn.Module:
    """A unit that runs twice in one forward."""
    return chain("again between again", again=square(7), between=square(7))


@ZOO.model("block_twice", float_input(7), ("block.inner", "between"), "reused_module uneven", "reused_modules")
def block_twice() -> nn.Module:
    """A unit inside a module that runs twice in one forward."""
    block = chain("inner last", inner=square(7), last=square(7))
    return chain("block between block", block=block, between=square(7))


@ZOO.model("dropped_out", float_input(7), ("first", "last"), "uneven")
def dropped_out() -> nn.Module:
    """Elements that are dropped at random, inside of units and between them."""
    units = [chain("linear dropout", linear=square(7), dropout=TreeDropout(7)) for _ in range(2)]
    return chain("first between last", first=units[0], between=TreeDropout(7), last=units[1])


@ZOO.model("self_conditioned", float_input(7), ("again", "last"), "reused_module uneven", "reused_modules")
def self_conditioned() -> nn.Module:
    """A unit that runs without gradients, then with them, then without them again, in one forward."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hint = torch.tanh(m.again(x))
        output = torch.tanh(m.again(x + hint))
        with torch.no_grad():
            target = torch.tanh(m.again(output))
        return m.last(output - 0.5 * target)

    return Wired(flow, again=square(7), last=square(7))


@ZOO.model(
    "registered_twice",
    float_input(7),
    ("layer", "other"),
    "reused_module tied uneven",
    "shared_parameters reused_modules",
)
def registered_twice() -> nn.Module:
    """A unit under two names."""
    layer = square(7)
    return chain("layer other alias", layer=layer, other=square(7), alias=layer)


@ZOO.model(
    "registered_outside", float_input(7), ("block",), "reused_module tied uneven", "shared_parameters reused_modules"
)
def registered_outside() -> nn.Module:
    """A module inside a unit that the model has under another name too, outside of the unit."""
    inner = square(7)
    return chain("block alias", block=chain("inner last", inner=inner, last=square(7)), alias=inner)
