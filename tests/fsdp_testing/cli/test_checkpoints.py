"""`fsdp-verify checkpoints` end to end: exit codes, table, files, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_testing.cli.main import main
from fsdp_testing.search.checkpoints import exchange

ONE = ("--world-size", "2", "--subject", "adamw, two groups", "--way", "memory")


def test_a_fault_is_printed_drawn_and_written(tmp_path: Path, verify: Callable[..., object]):
    page, data = tmp_path / "page", tmp_path / "all.json"
    ended = verify(
        "checkpoints",
        "single-process",
        "checkpoint_faults:FORGETS_STEP",
        *ONE,
        "--html",
        str(page),
        "--json",
        str(data),
    )
    assert ended.code == 1
    last = "exit code 1: 2 of 4 loaded states are equal to what was saved, and train on equally; 2 fail"
    assert ended.out.splitlines()[-1] == last
    assert " s  saving and loading, 6 states in all\n" in ended.out, "a log says what goes on"
    assert "1 single-process no_shard/2/root = = X" in " ".join(ended.out.split())
    assert "loading: step of first.w.weight: got 0.0, expected 2.0" in ended.out
    found = json.loads(data.read_text())
    assert found["format"] == "fsdp_testing/checkpoints"
    assert sum(one["verdict"] == "fail" for one in found["results"]) == 2
    drawn = (page / "index.html").read_text()
    assert drawn.count('class="cell holds"') == 2
    assert drawn.count('class="cell fails"') == 2
    assert "step of first.w.weight" in drawn


def test_what_nobody_can_be_asked_is_bad_usage(capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoints", "torch-ddp", "--subject", "adamw"]) == 2
    assert "--subject: expected one of 'adamw, two groups', " in capsys.readouterr().err
    assert main(["checkpoints", "torch-ddp", "torch-fsdp2", "--world-size", "5"]) == 2
    assert "got torch-ddp, torch-fsdp2. Leave them out" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made: list[str] = []

    def begun(**_: object) -> str:
        made.append(str(tmp_path / "scratch"))
        Path(made[0]).mkdir()
        return made[0]

    def interrupted(*_: object) -> None:
        assert Path(made[0]).is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange.tempfile, "mkdtemp", begun)
    monkeypatch.setattr(exchange.Exchange, "_attempt", interrupted)
    assert main(["checkpoints", "single-process", *ONE, "--json", str(tmp_path / "all.json")]) == 130
    assert made
    assert not list(tmp_path.iterdir())
