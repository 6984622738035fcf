"""Models that take their input in unusual forms, or compute from it in its own dtype."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import Family, Inputs, Wired, features, float_input
from fsdp_testing.cases.models.plain import square
from fsdp_testing.cases.models.tree_layers import Named, Record, TreeOffset

ZOO = Family()


def _keyword_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    left, right = features(seed, rank, step, (2, batch, 6), dtype).unbind(0)
    return Inputs((), {"batch": {"left": left, "pair": (right,), "gain": 0.5}})


def _container_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    one, two, three = features(seed, rank, step, (3, batch, 6), dtype).unbind(0)
    return Inputs((Named(one, two),), {"more": OrderedDict(third=three)})


@dataclass
class Fields(OrderedDict[str, Any]):
    """A dataclass that is a mapping of its fields too, as libraries of models have them."""

    mean: torch.Tensor | None = None
    spread: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Or from pairs, as a mapping is made: the first field has them all.
        pairs: list[Any] = [] if self.mean is None or isinstance(self.mean, torch.Tensor) else list(self.mean)
        self.update(pairs or {"mean": self.mean, "spread": self.spread})

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def _record_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    one, two, three, four = features(seed, rank, step, (4, batch, 6), dtype).unbind(0)
    return Inputs((Record(one, (two, "text")),), {"fields": Fields(three, four)})


@dataclass(slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    mean: torch.Tensor


def _rare_record_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    one, two, three, four = features(seed, rank, step, (4, batch, 6), dtype).unbind(0)
    fields = Fields(two, three)
    fields["more"] = four
    vars(fields)["scale"] = 0.5
    return Inputs((Slotted(one),), {"fields": fields})


def _two_inputs(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
    one, two = features(seed, rank, step, (2, batch, 6), dtype).unbind(0)
    return Inputs((one, two), {})


@ZOO.model("keywords", _keyword_input, ("linear", "offset"), "keyword_input")
def keywords() -> nn.Module:
    """Keyword-only nested inputs, and a unit that is called without arguments."""

    def flow(m: Any, *, batch: dict[str, Any]) -> torch.Tensor:
        left, (right,) = batch["left"], batch["pair"]
        return torch.tanh(m.linear(x=left, gain=batch["gain"]) + right + m.offset())

    return Wired(flow, linear=Wired(lambda m, *, x, gain: m.inner(x) * gain, inner=square(6)), offset=TreeOffset(6))


@ZOO.model("container_inputs", _container_input, ("first", "second"), "keyword_input")
def container_inputs() -> nn.Module:
    """Inputs in a named tuple and in an ordered dictionary, which are used as such."""

    def flow(m: Any, pair: Named, *, more: OrderedDict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.tanh(m.first(pair.mean) + pair.spread)
        return m.second(hidden + more["third"]) * (1.0 if isinstance(more, OrderedDict) else 0.0)

    return Wired(flow, first=square(6), second=square(6))


@ZOO.model("record_input", _record_input, ("first", "second"), "keyword_input")
def record_input() -> nn.Module:
    """Inputs in a dataclass, and in one that is a mapping too."""

    def flow(m: Any, record: Record, *, fields: Fields) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(m.first(record.mean) + record.parts[0])
        assert fields.mean is not None  # it was made of tensors
        return m.second(hidden + fields.mean + fields["spread"]) * (1.0 if isinstance(fields, Fields) else 0.0)

    return Wired(flow, first=square(6), second=square(6))


@ZOO.model("rare_record_input", _rare_record_input, ("first", "second"), "keyword_input")
def rare_record_input() -> nn.Module:
    """Inputs in a dataclass with slots, and in one that is a mapping of more than its fields, with an attribute besides."""

    def flow(m: Any, record: Slotted, *, fields: Fields) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(m.first(record.mean))
        # As models look for inputs that may be missing.
        return m.second(hidden + fields["mean"] + fields["spread"] + fields.get("more", 0.0)) * vars(fields).get(
            "scale", 1.0
        )

    return Wired(flow, first=square(6), second=square(6))


@ZOO.model("precise_input", float_input(6), ("first", "time", "last"))
def precise_input() -> nn.Module:
    """A unit that is given single precision, from which it computes before it casts."""

    def flow(m: Any, x: torch.Tensor) -> torch.Tensor:
        moments = torch.linspace(0.1, 1.0, 6, dtype=torch.float32, device=x.device)
        return m.last(torch.tanh(m.first(x)) + m.time(moments))

    time = Wired(lambda m, moments: m.inner(torch.sin(777.0 * moments).to(m.inner.weight.dtype)), inner=square(6))
    return Wired(flow, first=square(6), time=time, last=square(6))


@ZOO.model("casting", float_input(6), ("wave", "last"))
def casting() -> nn.Module:
    """A model that computes in the dtype of its inputs before it casts them to that of its weights."""
    wave = Wired(lambda m, x: m.inner(torch.sin(777.0 * x).to(m.inner.weight.dtype)), inner=square(6))
    return Wired(lambda m, x: m.last(torch.tanh(m.wave(x))), wave=wave, last=square(6))


@ZOO.model("two_inputs", _two_inputs, ("first", "last"))
def two_inputs() -> nn.Module:
    """Two inputs; the model computes from the second one in that one's dtype."""

    def flow(m: Any, x: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
        return m.last(torch.tanh(m.first(x) + torch.sin(777.0 * wave).to(x.dtype)))

    return Wired(flow, first=square(6), last=square(6))
