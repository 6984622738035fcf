"""`fsdp-verify fuzz` and `replay` end to end: exit codes, files, resuming, interruption, bad input."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.records import Case, FailureKind, Judgement, Verdict
from fsdp_testing.checks.findings import rerun
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.cli import fuzz as fuzz_command
from fsdp_testing.cli.main import main
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.search.campaign.tally import CampaignTally, campaign_sheet
from fsdp_testing.search.state import State, read_state, write_state

FAULTS = Path(__file__).parents[1] / "search" / "campaign"
BROKEN = Path(__file__).parents[2] / "quality" / "broken"
WRONG = "fuzz_faults:WRONG_IN_CLIP"


@pytest.fixture(autouse=True)
def _faults_are_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (FAULTS, BROKEN):
        monkeypatch.syspath_prepend(str(folder))


def fuzz(*arguments: str) -> int:
    return main(["fuzz", *arguments, "--jobs", "1"])


def test_a_variant_has_the_known_failures_of_what_it_is_built_on():
    parser = argparse.ArgumentParser()
    fuzz_command.add(parser.add_subparsers())
    variant = replace(registry.load("torch-fsdp2"), name="variant")
    assert fuzz_command._plan(parser.parse_args(["fuzz", "variant"]), variant).known == shipped_known("torch-fsdp2")


def test_a_healthy_implementation_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fuzz("toy:UNBROKEN", "--examples", "40", "--state", str(tmp_path / "s"), "--without", "tree.strided") == 0
    assert len(read_state(tmp_path / "s" / "state.json").verdicts) == 40
    said = capsys.readouterr().out
    assert "features are not drawn, because" in said
    assert "0 findings" in said
    assert " s  starting ranks, then running cases\n" in said, "a log says what goes on"
    assert said.splitlines()[-1] == "exit code 0: every case that ran is right, or a known failure"


def test_a_fault_is_found_shrunk_told_replayed_and_not_told_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fuzz(WRONG, "--examples", "400", "--stop-at-first", "--state", str(tmp_path / "s")) == 1
    (folder,) = (tmp_path / "s" / "found").iterdir()
    case = json.loads((folder / "case.json").read_text())
    assert [operation["kind"] for operation in case["program"]] == ["forward_backward", "clip"]
    assert "clip" in (folder / "README.md").read_text()
    (again,) = re.findall(r"run it again: fsdp-verify (.*)", capsys.readouterr().out)
    assert main(shlex.split(again)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"on {WRONG}: fails" in said
    assert "the same bits on restarted processes" in said
    assert main(["replay", str(folder / "case.json"), "--implementation", "toy:UNBROKEN", "--once"]) == 0
    first = read_state(tmp_path / "s" / "state.json")
    capsys.readouterr()
    # What was found is not told again, and no success either.
    assert fuzz(WRONG, "--examples", "64", "--state", str(tmp_path / "s")) == 1
    assert "cases that failed as an earlier run of this campaign found" in capsys.readouterr().out
    assert len(read_state(tmp_path / "s" / "state.json").verdicts) > len(first.verdicts)
    assert len(list((tmp_path / "s" / "found").iterdir())) <= 2


RIGHT, UNDECIDED = Judgement(Verdict.PASS), Judgement(Verdict.UNKNOWN, reason="the oracle's own numbers overflow")
ONE_BATCH = ("--examples", "24", "--world-size", "2")


def failing(kind: FailureKind, case: Case, sort: str = "") -> Judgement:
    return Judgement(Verdict.FAIL, finding(case, kind, "the run", -1, f"rank 1 {kind}", ranks=(1,), sort=sort))


def judged_as(judgement: Callable[[Case], Judgement]) -> Callable[..., list[JudgedCase]]:
    def judge_batch(
        _runner: CaseRunner, _name: str, cases: Sequence[Case], *_: object, **__: object
    ) -> list[JudgedCase]:
        judgements = [judgement(cases[0]), *[RIGHT] * (len(cases) - 1)]
        return [JudgedCase(case, one) for case, one in zip(cases, judgements, strict=True)]

    return judge_batch


def test_a_case_that_could_not_be_judged_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(CaseRunner, "judge_batch", judged_as(lambda _: UNDECIDED))
    assert fuzz("toy:UNBROKEN", *ONE_BATCH) == 3
    assert "exit code 3: 1 case could not be judged" in capsys.readouterr().out


def test_what_failed_once_and_passes_alone_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answers = iter([judged_as(partial(failing, FailureKind.HUNG)), judged_as(lambda _: RIGHT)])
    monkeypatch.setattr(CaseRunner, "judge_batch", lambda *given, **named: next(answers)(*given, **named))
    assert fuzz("toy:UNBROKEN", *ONE_BATCH) == 3
    assert "exit code 3: cases that failed once and pass alone: hung" in capsys.readouterr().out


def test_suspects_that_nobody_looked_at_are_failures():
    tally = CampaignTally(verdicts=Counter({Verdict.PASS: 100, Verdict.FAIL: 4}))
    assert tally.exit_code == 1
    assert campaign_sheet(tally, "toy", Path("s")).conclusion == "4 cases failed"


@pytest.mark.parametrize(
    ("verdicts", "code", "word"),
    [
        (("right", "right"), 0, "passed"),
        (("diverged", "diverged"), 1, "fails"),
        (("leaked", "leaked"), 1, "fails"),
        (("diverged", "right"), 3, "unknown"),
        (("right", "diverged"), 3, "unknown"),
        (("undecided", "undecided"), 3, "unknown"),
    ],
)
def test_a_replay_has_the_word_of_both_its_runs(
    verdicts: tuple[str, str], code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    case = CaseDrawer(Scope(registry.load("toy:UNBROKEN").capabilities)).draw(SeededChoices(1))
    (tmp_path / "case.json").write_text(case.to_json())
    judgements = {
        "right": RIGHT,
        "undecided": UNDECIDED,
        "diverged": failing(FailureKind.DIVERGED, case),
        "leaked": failing(FailureKind.LEAKED, case, sort="model"),
    }
    results = iter([(JudgedCase(case, judgements[one]), "the bits") for one in verdicts])
    monkeypatch.setattr(rerun, "replay", lambda *_: next(results))
    assert main(["replay", str(tmp_path / "case.json"), "--implementation", "toy:UNBROKEN"]) == code
    assert f"on toy:UNBROKEN: {word}" in " ".join(capsys.readouterr().out.split())


# Shells have their background jobs ignore Ctrl-C, and processes started there inherit that.
HEARS_CTRL_C = """
import signal, sys
from fsdp_testing.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_leaves_everything_on_disk(tmp_path: Path):
    command = [sys.executable, "-c", HEARS_CTRL_C, "fuzz", "torch-ddp", "--seconds", "300", "--state", "s"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(scratch),
    }
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "s" / "state.json").exists() and time.monotonic() < limit:
            if process.poll() is not None:
                break
            process_wait(process, 0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert b"Traceback" not in err
    assert read_state(tmp_path / "s" / "state.json").counts().total() > 0
    assert not list(scratch.glob("fsdp-batch-*")), "folders of batches are left"


def process_wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Lets a moment pass, or less if the process ends."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "expected one of"),
        (["torch-ddp", "--without", "tree.what"], "tree.what"),
        (["torch-ddp", "--known", "none.json"], "expected a file of known failures for --known"),
        (["torch-ddp", "--seconds", "-1"], "positive number"),
        (["torch-ddp", "--world-size", "0"], "at least 1"),
        ([], "expected NAME"),
        (["torch-ddp", "--exhibits", "2"], "museum --exhibits"),
    ],
)
def test_bad_usage_ends_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert fuzz(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_state_of_another_implementation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_state(tmp_path / "s" / "state.json", State({"implementation": "other"}))
    assert fuzz("torch-ddp", "--state", str(tmp_path / "s")) == 2
    assert "'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "readable text file"), ("{", "JSON"), ('{"format": "fsdp_testing/case", "version": 99}', "newer")],
)
def test_a_file_that_cannot_be_replayed_ends_with_2(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "case.json"
    if text is not None:
        file.write_text(text)
    assert main(["replay", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_case_alone_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "case.json"
    file.write_text(CaseDrawer(Scope()).draw(SeededChoices(1)).to_json())
    assert main(["replay", str(file)]) == 2
    assert "--implementation" in capsys.readouterr().err
