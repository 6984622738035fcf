"""`fsdp-verify checkpoints` end to end: exit codes, table, files, bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cli.main import main
from fsdp_testing.report.terminal import Output, print_sheet
from fsdp_testing.search.checkpoints import exchange
from fsdp_testing.search.checkpoints.summary import Summary, checkpoints_sheet

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
    assert main(["checkpoints", "torch-ddp", "--world-size", "2,16"]) == 2
    assert "expected world sizes of [2, 3, 4], got [16]" in capsys.readouterr().err


def test_what_is_not_claimed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of two subjects one was dropped without a word, and of the other the optimizer; all that was asked held."""
    whole = registry.load("single-process")
    lesser = replace(whole, capabilities=whole.capabilities - {"frozen_mixed_unit", "optim_state"})
    monkeypatch.setattr(registry, "load", lambda _: lesser)
    plan = exchange.Plan((lesser,), (2,), ("no state", "adamw, two groups"))
    told = [
        "single-process: adamw, two groups; it needs frozen_mixed_unit",
        "single-process: the state of the optimizer; it needs optim_state",
        "single-process: full_shard/2/root; it needs full_shard",
        "single-process: shard_grad_op/2/beside; it needs shard_grad_op",
    ]
    assert plan.not_asked() == told
    assert exchange.Plan((whole,), (2,)).not_asked() == told[2:]
    print_sheet(checkpoints_sheet(Summary({}, (), (), 1.0, tuple(told))), Output(file=sys.stdout, width=120))
    assert all(line in capsys.readouterr().out for line in told[:1])
    assert main(["checkpoints", "single-process", *ONE, "--subject", "no state"]) == 2
    assert "got 'adamw, two groups': single-process: adamw, two groups; it needs" in capsys.readouterr().err


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
