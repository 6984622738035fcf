"""The drawn layout is the reference's layout, and every bad model or option is reported in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cli.unit_layouts import unit_layouts

FACTORIES = """
import torch
from torch import nn

def two():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

def huge():
    return nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(64)])

def mixed():
    return nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))])

def bare():
    return nn.ReLU()

def broken():
    raise RuntimeError("no weights here")

def number():
    return 3

INSTANCE = nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_models.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_small_model_by_hand(verify: Callable[..., Any]) -> None:
    """Weights of 9 and 6, biases of 3 and 2, starts at multiples of 4: 0-9, 12-15, 16-22, 24-26; two ranks of 13."""
    ended = verify("plan", "planned_models:two")
    assert ended.code == 0, ended.err
    text = re.sub(r" +", " ", ended.out)
    assert "(root) Sequential: 20 elements of float32 in 4 parameters; 13 (52 B) a rank; 6 of padding (23 %)" in text
    for line in ("0.weight 3x3 [0, 9) 0", "0.bias 3 [12, 15) 0-1", "1.weight 2x3 [16, 22) 1", "1.bias 2 [24, 26) 1"):
        assert line in text
    assert " rank 0 █████████···▒\n" in text
    assert " rank 1 ▒▒·██████··▒▒\n" in text


def test_packed_has_no_padding_but_the_ranks_own(verify: Callable[..., Any]) -> None:
    text = verify("plan", "planned_models:two", "--packed", "--world-size", "3").out
    assert "1 of padding" in text
    assert "[9, 12)" in text


def test_the_pieces_of_one_rank(verify: Callable[..., Any]) -> None:
    text = re.sub(r" +", " ", verify("plan", "planned_models:two", "--rank", "1").out)
    assert "0.bias [1, 3) [0, 2)" in text
    assert "1.weight [0, 6) [3, 9)" in text
    assert "0.weight" not in text


def test_units_by_pattern_class_and_default(verify: Callable[..., Any]) -> None:
    assert "3 units" in verify("plan", "gpt").out
    assert "2 units" in verify("plan", "gpt", "--unit", "blocks.0").out
    assert "3 units" in verify("plan", "gpt", "--unit", "blocks.?").out
    assert "3 units" in verify("plan", "gpt", "--unit", "Block").out


def test_billions_of_elements_on_sixteen_thousand_ranks(verify: Callable[..., Any]) -> None:
    ended = verify("plan", "planned_models:huge", "--world-size", "16384", "--unit", "Linear")
    assert ended.code == 0
    assert "64 units, 4,295,491,584 elements on 16,384 ranks" in ended.out
    assert "█" not in ended.out


def test_an_instance_will_do(verify: Callable[..., Any]) -> None:
    assert "6 elements" in verify("plan", "planned_models:INSTANCE").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "expected one of mlp, "),
        (("planned_models:absent",), "AttributeError"),
        (("absent_module:x",), "ModuleNotFoundError"),
        (("planned_models:broken",), "no weights here"),
        (("planned_models:number",), "got int"),
        (("planned_models:bare",), "nothing to shard"),
        (("planned_models:mixed",), "one dtype in unit 'root', got torch.float32, torch.float64"),
        (("mlp", "--rank", "2"), "expected 0 to 1, got 2"),
        (("mlp", "--rank", "-1"), "expected 0 to 1, got -1"),
        (("mlp", "--strategy", "HYBRID_SHARD"), "expected RxS with the hybrid strategies and with no other, got none"),
        (("mlp", "--strategy", "FULL_SHARD", "--mesh", "2x2"), "got 2x2 with FULL_SHARD"),
        (("mlp", "--mesh", "2x0"), "expected two numbers of at least 1 such as 2048x8, got '2x0'"),
        (("mlp", "--mesh", "2x8", "--world-size", "3"), "expected 16, the ranks of --mesh 2x8, got 3"),
        (("mlp", "--unit", "absent.*", "--unit", "Nothing"), "got ['absent.*', 'Nothing']"),
    ],
)
def test_bad_input(verify: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ended = verify("plan", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


def test_a_world_without_ranks_is_refused(verify: Callable[..., Any]) -> None:
    ended = verify("plan", "mlp", "--world-size", "0")
    assert ended.code == 2
    assert "at least 1, got '0'" in ended.err


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


@pytest.mark.parametrize(
    ("arguments", "elements", "shard", "units"),
    [
        (
            ("llama-8b", "--world-size", "16384"),
            "8,030,261,248",
            "1.87 MiB",
            "blocks.1, blocks.2 ... blocks.31; 32 in all",
        ),
        (("llama-70b", "--mesh", "2048x8"), "70,553,706,496", "32.9 GiB", "2,048 replicas of 8 consecutive ranks"),
        (("llama-405b", "--world-size", "16384", "--dtype", "bfloat16"), "405,853,388,800", "47.2 MiB", "127 units"),
        (("mixture-8x7b", "--strategy", "NO_SHARD"), "46,702,792,704", "174 GiB", "each rank holds all of it"),
    ],
)
def test_models_of_the_field(
    verify: Callable[..., Any], arguments: tuple[str, ...], elements: str, shard: str, units: str
) -> None:
    """The numbers of parameters that their authors published; a rank's bytes are 4 or 2 times these over the shards."""
    ended = verify("plan", *arguments)
    assert ended.code == 0, ended.err
    assert f"{elements} elements on " in ended.out
    assert f": {shard} of parameters a rank" in ended.out
    assert units in ended.out
    assert ended.out.count("\n") < 120


def test_a_mesh_of_replicas(verify: Callable[..., Any]) -> None:
    """Six ranks as two copies on three: ranks 1 and 4 hold the same; ZeRO-2 keeps all units after their forward."""
    arguments = ("planned_models:two", "--mesh", "2x3", "--strategy", "HYBRID_SHARD_ZERO2", "--rank")
    first, second = (verify("plan", *arguments, rank).out for rank in ("1", "4"))
    assert first == second
    assert first == verify("plan", *arguments, "1", "--world-size", "6").out
    assert "0.weight" not in first
    assert "20 elements on 6 ranks: 36 B of parameters a rank" in first
    assert "2 replicas of 3 consecutive ranks; gathered units stay until their backward: up to 108 B a rank" in first
