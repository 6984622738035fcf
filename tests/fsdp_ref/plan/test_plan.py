"""The drawn layout is the reference's layout, and every bad model or option is reported in one line."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.plan.command import declare, drawn

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


@pytest.fixture
def plan() -> Callable[..., str]:
    def draw(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        declare(parser)
        return "".join(f"{line}\n" for line in drawn(parser.parse_args(arguments)))

    return draw


@pytest.mark.covers("COMP-17")
def test_a_small_model_by_hand(plan: Callable[..., str]) -> None:
    """Weights of 9 and 6, biases of 3 and 2, starts at multiples of 4: 0-9, 12-15, 16-22, 24-26; two ranks of 13."""
    text = re.sub(r" +", " ", plan("planned_models:two"))
    assert "(root) Sequential: 20 elements of float32 in 4 parameters; 13 (52 B) a rank; 6 of padding (23 %)" in text
    for line in ("0.weight 3x3 [0, 9) 0", "0.bias 3 [12, 15) 0-1", "1.weight 2x3 [16, 22) 1", "1.bias 2 [24, 26) 1"):
        assert line in text
    assert " rank 0 █████████···▒\n" in text
    assert " rank 1 ▒▒·██████··▒▒\n" in text


def test_packed_has_no_padding_but_the_ranks_own(plan: Callable[..., str]) -> None:
    text = plan("planned_models:two", "--packed", "--world-size", "3")
    assert "1 of padding" in text
    assert "[9, 12)" in text


def test_the_pieces_of_one_rank(plan: Callable[..., str]) -> None:
    text = re.sub(r" +", " ", plan("planned_models:two", "--rank", "1"))
    assert "0.bias [1, 3) [0, 2)" in text
    assert "1.weight [0, 6) [3, 9)" in text
    assert "0.weight" not in text


def test_billions_of_elements_on_sixteen_thousand_ranks(plan: Callable[..., str]) -> None:
    text = plan("planned_models:huge", "--world-size", "16384", "--unit", "Linear")
    assert "64 units, 4,295,491,584 elements on 16,384 ranks" in text
    assert "█" not in text


def test_an_instance_will_do(plan: Callable[..., str]) -> None:
    assert "6 elements" in plan("planned_models:INSTANCE")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing",), "expected one of llama-8b, "),
        (("planned_models:absent",), "AttributeError"),
        (("absent_module:x",), "ModuleNotFoundError"),
        (("planned_models:broken",), "no weights here"),
        (("planned_models:number",), "got int"),
        (("planned_models:bare",), "nothing to shard"),
        (("planned_models:mixed",), "one dtype in unit 'root', got torch.float32, torch.float64"),
        (("planned_models:two", "--rank", "2"), "expected 0 to 1, got 2"),
        (("planned_models:two", "--rank", "-1"), "expected 0 to 1, got -1"),
        (
            ("planned_models:two", "--strategy", "HYBRID_SHARD"),
            "RxS with the hybrid strategies and with no other, got none",
        ),
        (("planned_models:two", "--strategy", "FULL_SHARD", "--mesh", "2x2"), "got 2x2 with FULL_SHARD"),
        (("planned_models:two", "--mesh", "2x0"), "expected two numbers of at least 1 such as 2048x8, got '2x0'"),
        (("planned_models:two", "--mesh", "2x8", "--world-size", "3"), "expected 16, the ranks of --mesh 2x8, got 3"),
        (("planned_models:two", "--rates", "50,400"), "--rates: expected --traffic LIBRARY with it"),
        (("planned_models:two", "--unit", "absent.*", "--unit", "Nothing"), "got ['absent.*', 'Nothing']"),
    ],
)
def test_bad_input(plan: Callable[..., str], arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        plan(*arguments)


@pytest.mark.parametrize("rates", ["nan,400", "50,inf", "50", "0,400", "50,-1", "fast,400", "1,2,3"])
def test_rates_are_two_numbers_above_0(
    plan: Callable[..., str], capsys: pytest.CaptureFixture[str], rates: str
) -> None:
    with pytest.raises(SystemExit):
        plan("planned_models:two", "--traffic", "fsdp1", "--rates", rates)
    assert "argument --rates: expected" in capsys.readouterr().err


def test_time_and_memory_of_a_step_by_hand(plan: Callable[..., str]) -> None:
    """Two layers of 12 and 8 elements: a gather of 80 bytes, a reduction of as many, half of each over the link of 2 ranks."""
    text = plan("planned_models:two", "--packed", "--traffic", "fsdp1", "--tokens", "10", "--rates", "4e-8,1e-10")
    assert "gathered units of fsdp1 at once, after the first step: 80 B\n" in text
    assert "at these rates: 12 s of computation" in text  # 6 x 20 x 10 operations, 100 a second
    assert ", 2 s of communication; a step takes 12 s if they overlap all the time, 14 s if never" in text


def test_the_command_draws_and_refuses() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for model, code, told in (("planned_models:two", 0, "rank 1"), ("planned_models:bare", 2, "nothing to shard")):
        command = [sys.executable, "-m", "fsdp_ref.plan", model]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert ended.returncode == code, ended.stderr
        assert told in ended.stdout + ended.stderr


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
    plan: Callable[..., str], arguments: tuple[str, ...], elements: str, shard: str, units: str
) -> None:
    """The numbers of parameters that their authors published; a rank's bytes are 4 or 2 times these over the shards."""
    text = plan(*arguments)
    assert f"{elements} elements on " in text
    assert f": {shard} of parameters a rank" in text
    assert units in text
    assert text.count("\n") < 120


def test_a_mesh_of_replicas(plan: Callable[..., str]) -> None:
    """Six ranks as two copies on three: ranks 1 and 4 hold the same; ZeRO-2 keeps all units after their forward."""
    arguments = ("planned_models:two", "--mesh", "2x3", "--strategy", "HYBRID_SHARD_ZERO2", "--rank")
    first, second = (plan(*arguments, rank) for rank in ("1", "4"))
    assert first == second
    assert first == plan(*arguments, "1", "--world-size", "6")
    assert "0.weight" not in first
    assert "20 elements on 6 ranks: 36 B of parameters a rank" in first
    assert "2 replicas of 3 consecutive ranks; gathered units stay until their backward: up to 108 B a rank" in first
