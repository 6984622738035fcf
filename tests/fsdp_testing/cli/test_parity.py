"""Two implementations side by side: equal to itself, different from another, and bad usage in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_an_implementation_has_its_own_order(verify: Callable[..., Any]) -> None:
    ended = verify("parity", "torch-fsdp2", "torch-fsdp2", "--model", "mlp")
    assert ended.code == 0, ended.out + ended.err
    assert "mlp, full_shard, 2 ranks: same order" in ended.out
    assert ended.out.rstrip().splitlines()[-1].startswith("torch-fsdp2 and torch-fsdp2: the same order in all")


def test_torch_fsdp1_and_fsdp2_ask_for_their_units_differently(verify: Callable[..., Any]) -> None:
    ended = verify("parity", "torch-fsdp1", "torch-fsdp2", "--model", "deep_nest")
    assert ended.code == 1, ended.out + ended.err
    assert "deep_nest, full_shard, 2 ranks: differ in requests" in ended.out
    assert "(same units" in ended.out
    assert "requests, ranks 0, 1" in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("torch-fsdp1",), "required: NAME"),
        (("torch-fsdp1", "no-such"), "no-such"),
        (("torch-fsdp1", "torch-ddp"), "claim `unit_trace`, got torch-ddp"),
        (("torch-fsdp1", "torch-fsdp2", "--model", "absent"), "absent"),
        (("torch-fsdp1", "torch-fsdp2", "--world-size", "0"), "at least 1, got 0"),
    ],
)
def test_bad_usage(verify: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ended = verify("parity", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
