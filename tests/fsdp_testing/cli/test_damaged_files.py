"""Files that somebody damaged, or made to do harm: one message and exit code 2 from every command that reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cases.records import Case, FailureKind, ModelSpec, RunReport, Step, WorldSpec
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.judging.signature import Signature
from fsdp_testing.search.state import State, write_state

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


def test_nested_tables_of_expected_failures(tmp_path: Path, verify: Verify) -> None:
    file = tmp_path / "known.toml"
    file.write_text("a = " + DEEP)
    ended = verify("run", "fsdp_ref-composable", "--expected-failures", str(file))
    assert ended.code == 2
    assert str(file) in ended.err


def test_a_finding_whose_other_files_are_no_text(tmp_path: Path, verify: Verify) -> None:
    case = Case(ModelSpec("mlp"), WorldSpec(2), (Step(),), seed=1)
    sound = Discovery(
        "fsdp_ref-composable", Signature(FailureKind.DIVERGED, "parameter", "step"), case, case, "r"
    ).to_json()
    first = with_finding(tmp_path / "a", sound.encode(), beside=b"\xff\xfe\x00")
    ended = verify("merge", str(first), str(second_part(tmp_path / "b")), "--state", str(tmp_path / "all"))
    assert ended.code == 2, ended
    assert str(first) in ended.err


def test_a_damaged_finding_of_an_earlier_campaign_is_left_out(tmp_path: Path) -> None:
    from fsdp_testing.adapters import registry
    from fsdp_testing.cases.drawing import Scope
    from fsdp_testing.ranks.pool import Pool
    from fsdp_testing.search.campaign.campaign import Campaign, Plan

    adapter = registry.load("fsdp_ref-composable")
    folder = with_finding(tmp_path / "whole", b"\xff\xfe")
    plan = Plan(implementation=adapter, scope=Scope(adapter.claimed(1)), state=folder)
    (message,) = Campaign(plan, Pool(), lambda _: None, lambda *_: None).damaged
    assert "finding.json" in message
    assert "UTF-8" in message


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
