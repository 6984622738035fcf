"""`plan` draws what the reference draws, of built-in models too, and says in one line what it cannot draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_ref.plan.command import _bytes, _share
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
        (("llama-like 70B",), "got 'llama-like 70B'. Did you mean llama-70b"),
        (("mlp", "--memory", "0"), "a number above 0, got '0'"),
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


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"two_dtypes", "quantized"}))
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


def test_what_training_takes_follows_the_stated_rule(verify: Callable[..., Any]) -> None:
    model = MODELS["mlp"].build(0)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    numbers, rows = sum(parameter.numel() for parameter in model.parameters()), 10
    taken = 4 * numbers + 4 * numbers + 8 * numbers + 4 * rows * sum(sum(matrix.shape) for matrix in matrices)
    whole = ("plan", "mlp", "--strategy", "NO_SHARD", "--packed", "--world-size", "2", "--tokens", str(rows))
    gib = 1024**3
    assert "fits in" not in verify(*whole).out
    assert verify(*whole, "--memory", repr((taken + 0.5) / gib)).out.splitlines()[-1].startswith("fits in ")
    assert verify(*whole, "--memory", repr((taken - 0.5) / gib)).out.splitlines()[-1].startswith("does not fit in ")
    for part in ("parameters", "gradients", "optimizer state (Adam, float32)", "activations of 10 tokens"):
        assert part in verify(*whole).out


@pytest.mark.parametrize(
    ("model", "strategy", "held"),
    [
        ("uneven", "FULL_SHARD", slice(3)),
        ("gpt", "FULL_SHARD", slice(None)),
        ("uneven", "SHARD_GRAD_OP", slice(None)),
        ("uneven", "NO_SHARD", slice(0)),
    ],
)
def test_what_is_gathered_counts(verify: Callable[..., Any], model: str, strategy: str, held: slice) -> None:
    """FULL_SHARD holds a root and three units in a row, here the first three; SHARD_GRAD_OP holds all; each a gradient too."""
    wholes = [
        unit.shards.padded_numel * unit.element_bytes
        for unit in unit_layouts(MODELS[model].build(0, torch.float32), world_size=2, units=MODELS[model].units)
    ]
    size = sum(wholes[held]) + max(wholes) if wholes[held] else 0
    line = next(line for line in verify("plan", model, "--strategy", strategy).out.splitlines() if "a rank: " in line)
    assert f" {_bytes(size)} gathered units and a whole gradient" in line


def test_shares_are_plain_numbers():
    assert [_share(part, 100) for part in (0, 1, 2, 99, 100, 250)] == ["0 %", "1 %", "2 %", "99 %", "100 %", "250 %"]
    assert (_share(1, 3000), _share(1, 0)) == ("0.033 %", "0 %")
