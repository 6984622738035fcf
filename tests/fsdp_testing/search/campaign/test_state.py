"""What a campaign leaves on disk is whole, is read again, and damage to it is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import Freeze, Step
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging.signature import Signature
from fsdp_testing.search.campaign.rerun import check_claims, read_recorded
from fsdp_testing.search.campaign.state import Progress, StateDirectory

FOUND = Discovery(
    "torch-ddp", Signature("diverged", "value", "step"), case(micro(1), Step()), case(Step()), "is off by 1"
)


def test_progress_and_findings_come_back(tmp_path: Path):
    state = StateDirectory(tmp_path / "state", "torch-ddp")
    assert state.load() == Progress("torch-ddp")
    progress = Progress("torch-ddp", 3, 10, 8, 1.5, {"pass": 8}, {"rule": 2}, 1, (7, 9), {"rule": 1})
    state.save(progress)
    state.write_files(f"found/{FOUND.name}", [("finding.json", FOUND.to_json())])
    again = StateDirectory(tmp_path / "state", "torch-ddp")
    assert again.load() == progress
    (folder,) = again.found()
    assert Discovery.from_json((folder / "finding.json").read_text(), "here") == FOUND


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = StateDirectory(tmp_path, "torch-ddp")
    state.save(Progress("torch-ddp", drawn=1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.save(Progress("torch-ddp", drawn=2))
    assert state.load().drawn == 1


def test_a_state_that_cannot_be_written_is_a_bad_argument(tmp_path: Path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(InvalidArgument, match="--state: expected a place that can be written to"):
        StateDirectory(tmp_path / "state", "torch-ddp").save(Progress("torch-ddp"))


def test_a_damaged_state_is_told(tmp_path: Path):
    state = StateDirectory(tmp_path, "torch-ddp")
    state.save(Progress("torch-ddp"))
    text = (tmp_path / "state.json").read_text()
    for damaged in (text[:-5], text.replace('"version": 3', '"version": 9'), text.replace("torch-ddp", "other")):
        (tmp_path / "state.json").write_text(damaged)
        with pytest.raises(InvalidRecord, match=r"state\.json"):
            state.load()


def test_a_state_of_version_1_is_read_without_its_coverage(tmp_path: Path):
    document = {"format": "fsdp_testing/fuzz_state", "version": 1, "implementation": "torch-ddp", "drawn": 9}
    (tmp_path / "state.json").write_text(json.dumps({**document, "keys": [1], "arcs": [2], "rules": {"a": 1}}))
    assert StateDirectory(tmp_path, "torch-ddp").load() == Progress("torch-ddp", drawn=9)


def test_cases_are_read_from_every_file_that_holds_one(tmp_path: Path):
    alone = tmp_path / "case.json"
    alone.write_text(FOUND.case.to_json())
    assert [recorded.implementation for recorded in read_recorded(alone)] == [""]
    finding = tmp_path / "finding.json"
    finding.write_text(FOUND.to_json())
    (recorded,) = read_recorded(finding)
    assert (recorded.case, recorded.implementation) == (FOUND.case, "torch-ddp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a JSON document"),
        ("[1]", "expected a JSON object"),
        (FOUND.case.to_json()[:-3], "Is the file complete"),
        (FOUND.case.to_json().replace('"version": 1', '"version": 2'), "newer"),
        (FOUND.case.to_json().replace('"step"', '"stop"'), "a known kind of operation"),
        (FOUND.to_json().replace('"signature"', '"sig"'), r"unknown \[.sig.\] and missing \[.signature.\]"),
        (case(Freeze(("nothing.*",))).to_json(), "parts that have no meaning"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, said: str):
    file = tmp_path / "case.json"
    file.write_text(text)
    with pytest.raises(InvalidRecord, match=said):
        read_recorded(file)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="readable text file"):
        read_recorded(tmp_path / "none.json")


def test_what_is_not_claimed_is_not_replayed():
    with pytest.raises(InvalidArgument, match="thawed_parameters"):
        check_claims(case(Freeze(("*",))), registry.load("torch-ddp"))
