"""`fsdp-verify train` says of each script in examples/scripts what its expectations.toml says.

Those of tier "slow" run nightly, the rest with every push. Scripts of packages that are not installed are skipped.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "scripts"
EXPECTED = tomllib.loads((FOLDER / "expectations.toml").read_text(encoding="utf-8"))
CODES = {"pass": 0, "fail": 1, "unknown": 3}
KEYS = {"script", "arguments", "needs", "steps", "says", "options", "tier", "not_yet"}
MOST_UNKNOWN = 6


def with_mark(entry: dict[str, Any]) -> Any:
    name = " ".join([entry["script"], *entry.get("arguments", ()), *([entry["mistake"]] if "mistake" in entry else ())])
    marks = [pytest.mark.slow] if entry.get("tier") == "slow" else []
    marks += [pytest.mark.xfail(reason=entry["not_yet"], strict=True)] if "not_yet" in entry else []
    return pytest.param(entry, id=name, marks=marks)


def edited(entry: dict[str, Any]) -> str:
    text = (FOLDER / entry["script"]).read_text(encoding="utf-8")
    for old, new in entry.get("edits", ()):
        assert text.count(old) == 1, f"{entry['script']} has {text.count(old)} times, not once: {old!r}"
        text = text.replace(old, new)
    return text


def report_of(entry: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the script where only it is; return exit code and output, each run of white space as one blank."""
    for package in entry.get("needs", ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {entry['script']} is not tried")
    Path(entry["script"]).write_text(edited(entry), encoding="utf-8")
    options = ["--world-sizes", "2", "--steps", str(entry.get("steps", 4)), *entry.get("options", ())]
    code = main(["train", *options, entry["script"], *entry.get("arguments", ())])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.fixture(autouse=True)
def _empty_folder_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.mark.parametrize("entry", [*map(with_mark, EXPECTED["right"])])
def test_a_right_script_is_not_accused(entry: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, said = report_of(entry, capsys)
    assert code == CODES[entry["verdict"]], said
    assert not [words for words in entry.get("says", ()) if words not in said], said


@pytest.mark.parametrize("entry", [*map(with_mark, EXPECTED["wrong"])])
def test_a_wrong_twin_fails_and_the_place_is_named(entry: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, said = report_of(entry, capsys)
    assert code == CODES["fail"], said
    assert not [words for words in entry["says"] if words not in said], said


def test_the_expectations_are_about_all_scripts_and_well_formed() -> None:
    right, wrong = EXPECTED["right"], EXPECTED["wrong"]
    assert {entry["script"] for entry in right} == {path.name for path in FOLDER.glob("*.py")}
    for entry in right:
        assert entry["verdict"] in {"pass", "unknown"}, entry
        assert (entry["verdict"] == "unknown") == bool(entry.get("because")), entry
        assert set(entry) <= {*KEYS, "shows", "verdict", "because"} and entry["shows"], entry
    for entry in wrong:
        assert set(entry) <= {*KEYS, "mistake", "edits"} and entry["says"] and entry["edits"], entry
        compile(edited(entry), entry["script"], "exec")
    for entry in (*right, *wrong):
        assert entry.get("tier", "cpu") in {"cpu", "slow"}, entry
    assert sum(entry["verdict"] == "unknown" for entry in right) <= MOST_UNKNOWN


def test_the_docstring_of_each_script_says_what_it_is() -> None:
    for path in FOLDER.glob("*.py"):
        assert re.match(r'"""[A-Z].*\.\n?', path.read_text(encoding="utf-8")), path.name
