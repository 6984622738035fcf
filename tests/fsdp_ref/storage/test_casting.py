"""Containers whose tensors are cast: their types stay, and what holds nothing to cast stays the same object."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType

import pytest
import torch

from fsdp_ref.storage.precision import cast_floating, move_to


class Named(dict):
    """A user's own: its copy is to be of its class, with what else it has."""

    def __init__(self, items, *, note="kept"):
        super().__init__(items)
        self.note = note


class NamedData(UserDict):
    """What tokenizers return: more than its items."""

    note = "not set"


def named_data(items):
    data = NamedData(items)
    data.note = "kept"
    return data


@pytest.mark.parametrize(
    "container",
    [dict, OrderedDict, MappingProxyType, lambda items: defaultdict(list, items), Named, named_data],
    ids=["dict", "ordered", "view", "default", "subclass", "user dict"],
)
def test_mappings(container):
    ids = torch.tensor([1])
    value = container({"x": torch.ones(2), "ids": ids, "more": [torch.zeros(1), "text"]})
    found = cast_floating(value, torch.float64)
    assert type(found) is type(value)
    assert list(found) == ["x", "ids", "more"]
    assert (found["x"].dtype, found["more"][0].dtype) == (torch.float64, torch.float64)
    assert found["ids"] is ids
    assert found["more"][1] == "text"
    assert value["x"].dtype is torch.float32
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
    assert getattr(found, "note", None) == getattr(value, "note", None)
    assert cast_floating(value, torch.float32) is value


def test_moving_takes_every_tensor_whatever_its_dtype():
    here, there = torch.ones(2), torch.ones(2, dtype=torch.int64, device="meta")
    found = move_to({"here": here, "there": [there]}, torch.device("meta"))
    assert (found["here"].device.type, found["there"][0].device.type) == ("meta", "meta")
    assert found["there"][0] is there


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a mapping of its own fields, as model libraries return."""

    logits: torch.Tensor
    cache: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


@dataclasses.dataclass
class Plain(dict):
    """The same over a plain dict, whose items are no fields."""

    scale: float


def test_a_dataclass_that_is_a_mapping():
    ids = torch.tensor([1])
    value = Output(torch.ones(2), (torch.ones(1), ids))
    found = cast_floating(value, torch.float64)
    assert type(found) is Output
    assert list(found) == ["logits", "cache"]
    assert (found.logits.dtype, found.cache[0].dtype, found.loss) == (torch.float64, torch.float64, None)
    assert found["logits"] is found.logits  # cast once, not twice
    assert found["cache"] is found.cache
    assert found.cache[1] is ids
    assert value.logits.dtype is value["logits"].dtype is torch.float32
    assert cast_floating(value, torch.float32) is value


def test_items_of_a_dataclass_that_are_no_fields():
    value = Plain(2.0)
    value["x"] = torch.ones(1)
    found = cast_floating(value, torch.float64)
    assert (type(found), found.scale, found["x"].dtype) == (Plain, 2.0, torch.float64)
