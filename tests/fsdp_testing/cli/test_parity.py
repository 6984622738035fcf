"""Two implementations side by side: equal to itself, different from another, and bad usage in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_an_implementation_has_its_own_order(verify: Callable[..., Any]) -> None:
    ended = verify("parity", "torch-fsdp2", "torch-fsdp2", "--model", "mlp")
    assert ended.code == 0, ended.out + ended.err
    assert "mlp, full_shard, 2 ranks: same order" in ended.out
    assert (
        ended.out.rstrip()
        .splitlines()[-1]
        .startswith("exit code 0: torch-fsdp2 and torch-fsdp2: the same order in all")
    )


def test_torch_fsdp1_and_fsdp2_ask_for_their_units_differently(verify: Callable[..., Any], tmp_path: Path) -> None:
    ended = verify("parity", "torch-fsdp1", "torch-fsdp2", "--model", "deep_nest", "--html", str(tmp_path / "p"))
    assert ended.code == 1, ended.out + ended.err
    assert "deep_nest, full_shard, 2 ranks: differ in requests" in ended.out
    assert "(same units" in ended.out
    assert "requests, ranks 0, 1" in ended.out
    page = (tmp_path / "p" / "index.html").read_text(encoding="utf-8")
    assert f"written: {tmp_path / 'p' / 'index.html'}" in ended.out
    assert page.count('<section id="case') == 2
    assert 'class="only-right"' in page
    assert "deep_nest, 2 ranks, full_shard, float64 ≠" in page


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(
    verify: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    ended = verify("parity", "torch-fsdp1", "torch-fsdp2", "--html", str(tmp_path / "file" / "p"))
    assert ended.code == 2
    assert ended.err.startswith("fsdp-verify: --html: expected a writable path")
    assert ended.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("torch-fsdp1",), "required: NAME"),
        (("torch-fsdp1", "no-such"), "no-such"),
        (("torch-fsdp1", "torch-ddp"), "claim `unit_trace`, got torch-ddp"),
        (("torch-fsdp1", "torch-fsdp2", "--model", "absent"), "absent"),
        (("torch-fsdp1", "torch-fsdp2", "--world-size", "0"), "at least 1, got '0'"),
    ],
)
def test_bad_usage(verify: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ended = verify("parity", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
