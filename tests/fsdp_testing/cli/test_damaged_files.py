"""Files that somebody damaged, or made to do harm: one message and exit code 2 from every command that reads them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cases.records import (
    Case,
    CheckResult,
    FailureKind,
    Finding,
    ModelSpec,
    RunReport,
    Step,
    Verdict,
    WorldSpec,
)
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.signature import Signature
from fsdp_testing.search.state import Reason, State, read_state, write_state

Verify = Callable[..., Any]

DEEP = "[" * 100_000 + "]" * 100_000
LESS_DEEP = "[" * 400 + "]" * 400
DAMAGE = {
    "deeply nested": f'{{"format": "fsdp_testing/x", "version": 1, "a": {DEEP}}}'.encode(),
    "nested as deep as it can be read": f'{{"format": "fsdp_testing/x", "version": 1, "a": {LESS_DEEP}}}'.encode(),
    "no UTF-8": b'{"format": "\xff\xfe"}',
    "another coding": '{"format": "x"}'.encode("utf-16"),
}


def campaign(folder: Path, data: bytes | None) -> Path:
    """A directory of a campaign; its state is `data`, or sound with `data` as a finding."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(data or b"")
    return folder


def with_finding(folder: Path, data: bytes, beside: bytes = b"") -> Path:
    (folder / "found" / "one").mkdir(parents=True)
    shard = (1, 1) if folder.name == "whole" else (1, 2)
    write_state(folder / "state.json", State({"implementation": "fsdp_ref-composable"}, shard))
    (folder / "found" / "one" / "finding.json").write_bytes(data)
    (folder / "found" / "one" / "case.json").write_bytes(beside)
    return folder


def second_part(folder: Path) -> Path:
    write_state(folder / "state.json", State({"implementation": "fsdp_ref-composable"}, (2, 2)))
    return folder


def damaged(folder: Path, data: bytes) -> dict[str, list[str]]:
    """Every command that reads a file, given a damaged one."""
    file = folder / "damaged.json"
    file.write_bytes(data)
    sound = folder / "sound.json"
    sound.write_text(RunReport(results=(), shard=(1, 2)).to_json())
    state = campaign(folder / "state", data)
    certificate = folder / "certificate"
    certificate.mkdir()
    (certificate / "certificate.json").write_bytes(data)
    (folder / "dump_0").write_bytes(data)
    one = ["--examples", "1", "--world-size", "2"]
    return {
        "diagnose": ["diagnose", str(folder / "dump_0")],
        "replay": ["replay", str(file), "--implementation", "fsdp_ref-composable"],
        "merge": ["merge", str(sound), str(file)],
        "merge campaigns": ["merge", str(state), str(second_part(folder / "b")), "--state", str(folder / "all")],
        "merge findings": [
            "merge",
            str(with_finding(folder / "parts" / "a", data)),
            str(second_part(folder / "parts" / "b")),
            *("--state", str(folder / "all")),
        ],
        "fuzz --known": ["fuzz", "fsdp_ref-composable", "--known", str(file), "--state", str(folder / "new"), *one],
        "fuzz --state": ["fuzz", "fsdp_ref-composable", "--state", str(state), *one],
        "certify --state": ["certify", "fsdp_ref-composable", "--sample", "3", "--state", str(certificate)],
        "run --expected-failures": [
            "run",
            "fsdp_ref-composable",
            "--expected-failures",
            str(file),
            "--world-size",
            "2",
        ],
    }


COMMANDS = (
    "diagnose",
    "replay",
    "merge",
    "merge campaigns",
    "merge findings",
    "fuzz --known",
    "fuzz --state",
    "certify --state",
    "run --expected-failures",
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_says_what_is_wrong_with_a_damaged_file(
    command: str, damage: str, tmp_path: Path, verify: Verify
) -> None:
    commands = damaged(tmp_path, DAMAGE[damage])
    assert tuple(commands) == COMMANDS
    ended = verify(*commands[command])
    assert ended.code == 2, ended
    assert "expected" in ended.err
    assert str(tmp_path) in ended.err, "it says which file"
    assert len(ended.err) < 1000


def test_a_finding_whose_other_files_are_no_text(tmp_path: Path, verify: Verify) -> None:
    case = Case(ModelSpec("mlp"), WorldSpec(2), (Step(),), seed=1)
    sound = Discovery(
        "fsdp_ref-composable", Signature(FailureKind.DIVERGED, "parameter", "step"), case, case, "r"
    ).to_json()
    first = with_finding(tmp_path / "a", sound.encode(), beside=b"\xff\xfe\x00")
    ended = verify("merge", str(first), str(second_part(tmp_path / "b")), "--state", str(tmp_path / "all"))
    assert ended.code == 2, ended
    assert str(first) in ended.err


@pytest.mark.parametrize("damage", ["damaged", "gone"])
def test_a_campaign_is_not_resumed_without_its_findings(damage: str, tmp_path: Path) -> None:
    from fsdp_testing.adapters import registry
    from fsdp_testing.cases.drawing import Scope
    from fsdp_testing.ranks.pool import Pool
    from fsdp_testing.search.campaign.campaign import Campaign, Plan

    adapter = registry.load("fsdp_ref-composable")
    folder = with_finding(tmp_path / "whole", b"\xff\xfe")
    plan = Plan(implementation=adapter, scope=Scope(adapter.claimed(1)), state=folder)
    if damage == "gone":
        state = read_state(folder / "state.json")
        write_state(folder / "state.json", replace(state, subject=plan.subject, found=("one",)))
        shutil.rmtree(folder / "found")
    with pytest.raises(
        InvalidRecord, match=r"got none named .*Restore" if damage == "gone" else r"finding\.json.*UTF-8"
    ):
        Campaign(plan, Pool(), lambda _: None, lambda *_: None)


@pytest.mark.parametrize("shard", [(1, 10**9), (10**9, 10**9), (3, 2), (0, 2), (-1, -5)])
def test_parts_that_cannot_be_are_refused_at_once(shard: tuple[int, int], tmp_path: Path, verify: Verify) -> None:
    file = tmp_path / "part.json"
    file.write_text(RunReport(results=(), shard=shard).to_json())
    ended = verify("merge", str(file))
    assert ended.code == 2
    assert len(ended.err) < 1000
    whole = re.escape(str(max(shard)) if min(shard) > 0 and shard[0] <= shard[1] else "")
    assert re.search(whole, ended.err)


def test_missing_parts_are_told_as_ranges(tmp_path: Path, verify: Verify) -> None:
    for number in (2, 4):
        (tmp_path / f"{number}.json").write_text(RunReport(results=(), shard=(number, 90)).to_json())
    ended = verify("merge", str(tmp_path / "2.json"), str(tmp_path / "4.json"))
    assert "part 1 of 90 is missing; part 3 of 90 is missing; parts 5 to 90 of 90 are missing" in ended.err


def replayed(folder: Path, verify: Verify, document: dict[str, Any]) -> str:
    file = folder / "given.json"
    file.write_text(json.dumps(document))
    return refused(verify("replay", str(file), "--implementation", "fsdp_ref-composable"), file)


def refused(ended: Any, file: Path) -> str:
    """The one sentence with which a command refuses a file."""
    assert ended.code == 2, ended
    (line,) = ended.err.splitlines()
    assert str(file) in line and len(line) < 3100, line
    return line


CASE = json.loads(Case(ModelSpec("mlp"), WorldSpec(2), (Step(),), seed=1).to_json())
TREE = {"width": 3, "nodes": [{"kind": "linear", "name": "a"}]}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("a text", "expected an object with a list of nodes"),
        ({**TREE, "width": "3"}, "width: expected an integer"),
        ({**TREE, "nodes": [{"kind": "linear", "name": ["a"]}]}, "expected a valid, unique identifier"),
    ],
)
def test_a_tree_that_is_none(tree: Any, said: str, tmp_path: Path, verify: Verify) -> None:
    assert said in replayed(tmp_path, verify, {**CASE, "model": {**CASE["model"], "tree": tree}})


def test_a_report_whose_finding_has_no_legal_case(tmp_path: Path, verify: Verify) -> None:
    case = Case(ModelSpec("mlp"), WorldSpec(2), (Step(),), strategy="other")
    finding = Finding(FailureKind.DIVERGED, "a", 0, "step", (0,), "it differs", case)
    report = RunReport((CheckResult("fsdp_ref-composable", "training.sgd", "", (), Verdict.FAIL, "", (finding,)),))
    assert "strategy" in replayed(tmp_path, verify, json.loads(report.to_json()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model": {**CASE["model"], "tree": {"width": 3, "nodes": [{"kind": [0] * 10_000}]}}},
            "kind: expected one of linear",
        ),
        ({"program": [{"kind": "clip", "max_norm": 10**400}]}, "max_norm: expected a number"),
        ({"k" * 100_000: 1}, r"unknown \['kkk"),
        ({"a\nb": 1}, r"a\\nb"),
        ({"format": [0] * 10_000}, "expected format"),
    ],
)
def test_numbers_and_names_without_end(change: dict[str, Any], said: str, tmp_path: Path, verify: Verify) -> None:
    assert re.search(said, replayed(tmp_path, verify, {**CASE, **change}))


@pytest.mark.parametrize("number", ["x", "-1", "7", "9" * 5000])
def test_reasons_of_cases_that_are_none(number: str, tmp_path: Path, verify: Verify) -> None:
    state = State({"implementation": "fsdp_ref-composable"}, (1, 2), "p.", {number: Reason("it differs")})
    campaign(tmp_path / "a", None)
    write_state(tmp_path / "a" / "state.json", state)
    ended = verify(
        "merge", str(tmp_path / "a"), str(second_part(campaign(tmp_path / "b", None))), "--state", str(tmp_path / "all")
    )
    assert "reasons: expected numbers of its cases" in refused(ended, tmp_path / "a")


@pytest.mark.parametrize("text", ["a = 0x" + "f" * 6000, "a = " + DEEP, "a = ", "b = [{c = 0x" + "f" * 100 + "}]"])
@pytest.mark.parametrize("command", ["fuzz", "run"])
def test_toml_that_python_cannot_show(command: str, text: str, tmp_path: Path, verify: Verify) -> None:
    file = tmp_path / "known.toml"
    file.write_text(text)
    option = {"fuzz": ("--known", str(file), "--state", str(tmp_path / "new"), "--examples", "1")}
    given = option.get(command, ("--expected-failures", str(file)))
    assert "expected a TOML file" in refused(verify(command, "fsdp_ref-composable", *given), file)
