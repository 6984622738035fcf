"""`fsdp-verify certify` end to end: exit codes, files, going on, parts, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp_testing.cli.main import main

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _faults_are_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (TESTS / "fsdp_testing" / "search" / "certificate", TESTS / "quality" / "broken"):
        monkeypatch.syspath_prepend(str(folder))


def certify(*arguments: str) -> int:
    return main(["certify", *arguments, "--jobs", "1"])


def test_a_sound_implementation_ends_with_0_and_says_what_was_not_asked(tmp_path: Path, capsys):
    name = "small_faults:UNBROKEN"
    assert certify(name, "--sample", "12", "--html", "page", "--json", "all.json") == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "exit code 0: UNBROKEN: 12 of 12 cells hold"
    assert re.search(r" s  running cells, 0 of 12 are already done\n", said), "a log says what goes on"
    assert "are not claimed" in said
    assert "need shard_grad_op" in said
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["format"] == "fsdp_testing/certificate"
    assert found["verdicts"] == {"pass": 12, "fail": 0, "unknown": 0}
    page = (tmp_path / "page" / "index.html").read_text()
    assert 'class="cell holds"' in page
    assert 'class="cell fails' not in page


def test_a_fault_ends_with_1_and_is_drawn_told_and_replayed(tmp_path: Path, capsys):
    assert (
        certify("small_faults:ZEROS", "--sample", "12", "--explain", "600", "--html", "page", "--json", "all.json") == 1
    )
    said = " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "all.json").read_text())
    assert f"{found['verdicts']['pass']} of 12 cells hold; {found['verdicts']['fail']} fail" in said
    assert all("/to zeros/" in name for name in found["failing"])
    (cause,) = found["causes"]
    assert cause["cell"]["mesh"] == "1"
    kinds = [operation["kind"] for operation in cause["case"]["program"]]
    assert kinds == ["forward_backward", "zero_grad"]
    assert "zero_grad(set_to_none=False)" in said
    assert 'class="cell fails' in (tmp_path / "page" / "index.html").read_text()
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"format": "fsdp_testing/case", "version": 1, **cause["case"]}))
    assert main(["replay", str(case), "--implementation", "small_faults:ZEROS", "--once"]) == 1


def test_limits_and_parts(tmp_path: Path, capsys):
    name = "small_faults:UNBROKEN"
    assert certify(name, "--sample", "12", "--cells", "1", "--state", "s") == 0
    assert "have not run yet" in capsys.readouterr().out
    assert certify(name, "--sample", "12", "--state", "s") == 0
    said = capsys.readouterr().out
    assert "12 of 12 cells hold" in said
    assert "cells ran in earlier runs" in said
    assert certify(name, "--sample", "12", "--shard", "2/3") == 0
    assert "4 of 4 cells hold" in capsys.readouterr().out
    assert (tmp_path / ".fsdp-certificate" / "small_faults_UNBROKEN-sample-12-shard-2-of-3").is_dir()
    assert certify(name, "--sample", "13", "--state", "s") == 2
    assert "Give another --state directory" in capsys.readouterr().err


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two parts of a certificate, the whole, and parts of others: made once, since no test changes them."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(TESTS / "fsdp_testing" / "search" / "certificate"))
        for file, more in {"1": ("--shard", "1/2"), "2": ("--shard", "2/2"), "whole": ()}.items():
            given = ("--sample", "12", "--explain", "600", *more)
            assert certify("small_faults:ZEROS", *given, "--json", f"{file}.json") in (0, 1)
    second = json.loads((folder / "2.json").read_text())
    for file, other in {"other": {"sample": 13}, "renamed": {"implementation": "a:b"}}.items():
        (folder / f"{file}.json").write_text(json.dumps(second | other))
    return folder


def test_parts_are_put_together_as_if_they_had_been_one(parts: Path, tmp_path: Path, capsys):
    given = [str(parts / f"{part}.json") for part in (1, 2)]
    assert main(["merge", *given, "--json", "both.json", "--html", "page"]) == 1
    assert "of 12 cells hold" in capsys.readouterr().out
    assert (tmp_path / "page" / "index.html").exists()
    whole, both = (json.loads(file.read_text()) for file in (parts / "whole.json", tmp_path / "both.json"))
    assert whole["failing"]
    assert sorted(both["failing"]) == sorted(whole["failing"])
    for field in ("asked", "verdicts", "faces", "cube", "not_claimed", "unexplained"):
        assert both[field] == whole[field], field
    # Each part runs the first failing cells of one look again alone.
    assert both["unconfirmed"] <= whole["unconfirmed"]
    (cause,), (other,) = whole["causes"], both["causes"]
    assert (cause["cells"], cause["cell"], cause["signature"]) == (other["cells"], other["cell"], other["signature"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("1.json", "1.json"), "more than once"),
        (("1.json",), "part 2 of 2 is missing"),
        (("1.json", "whole.json"), "is a whole run, not a part"),
        (("1.json", "other.json"), "sample"),
        (("1.json", "renamed.json"), "implementation"),
        (("1.json", "2.json", "--junit", "x.xml"), "--junit"),
    ],
)
def test_parts_that_are_not_those_of_one_certificate_are_refused(
    given, said: str, parts: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(parts)
    assert main(["merge", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (parts / "x.xml").exists()


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b"])
def test_a_part_that_is_none_is_bad_usage(part: str, capsys):
    assert certify("toy:UNBROKEN", "--shard", part) == 2
    assert "expected I/N" in capsys.readouterr().err


def test_nothing_claimed_is_no_success(capsys):
    assert certify("small_faults:CLAIMS_NOTHING") == 3
    assert "0 of 0 cells hold" in capsys.readouterr().out
