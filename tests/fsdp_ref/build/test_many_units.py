"""Sharding a model unit by unit, from the inside out, costs in proportion to the number of units, however deep they lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ref import fully_shard


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Nest(nn.Module):
    """A layer around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner = inner


def nested(count: int) -> list[nn.Module]:
    """Modules around one another, innermost first."""
    modules: list[nn.Module] = [Nest(nn.Identity())]
    while len(modules) < count:
        modules.append(Nest(modules[-1]))
    return modules


def side_by_side(count: int) -> list[nn.Module]:
    """Modules beside one another, then the one around them."""
    layers = [nn.Linear(2, 2) for _ in range(count)]
    return [*layers, nn.Sequential(*layers)]


def calls(modules: list[nn.Module], **options: object) -> int:
    """Count the calls of functions, ours and torch's, that sharding all of them takes."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for module in modules:
            fully_shard(module, **options)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("shape", [nested, side_by_side])
@pytest.mark.parametrize("ignores", [False, True])
def test_twice_as_many_units_take_twice_the_calls(shape, ignores):
    def options(modules):
        return {"ignored_modules": [nn.Linear(2, 2)]} if ignores else {}

    calls(shape(2))  # what is made once
    few, many = shape(20), shape(40)
    assert calls(many, **options(many)) < 2.2 * calls(few, **options(few))
