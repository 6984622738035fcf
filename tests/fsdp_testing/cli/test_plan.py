"""`plan` draws what the reference draws, of built-in models too, and says in one line what it cannot draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_ref.plan.unit_layouts import unit_layouts
from fsdp_testing.cases.models import MODELS


def test_units_by_pattern_class_and_default(verify: Callable[..., Any]) -> None:
    assert "3 units" in verify("plan", "gpt").out
    assert "2 units" in verify("plan", "gpt", "--unit", "blocks.0").out
    assert "3 units" in verify("plan", "gpt", "--unit", "blocks.?").out
    assert "3 units" in verify("plan", "gpt", "--unit", "Block").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing",), "expected one of mlp, "),
        (("absent_module:x",), "ModuleNotFoundError"),
        (("mlp", "--rank", "2"), "expected 0 to 1, got 2"),
        (("mlp", "--unit", "absent.*", "--unit", "Nothing"), "got ['absent.*', 'Nothing']"),
        (("mlp", "--world-size", "0"), "at least 1, got '0'"),
    ],
)
def test_bad_input(verify: Callable[..., Any], arguments: tuple[str, ...], told: str) -> None:
    ended = verify("plan", *arguments)
    assert ended.code == 2
    assert told in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"two_dtypes"}))
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_element_of_every_zoo_model_has_exactly_one_owner(name: str, world_size: int) -> None:
    model = MODELS[name].build(0)
    units = unit_layouts(model, world_size=world_size, units=MODELS[name].units)
    held = sum(
        piece.span_in_param.numel
        for unit in units
        for rank in range(world_size)
        for piece in unit.shards.param_spans(rank)
    )
    assert held == sum(parameter.numel() for parameter in model.parameters())
