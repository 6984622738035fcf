"""Cases are read from every file that holds one, and damage to it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import Freeze, RunReport, Step
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.rerun import check_claims, read_recorded
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.judging.signature import Signature

FOUND = Discovery(
    "torch-ddp", Signature("diverged", "value", "step"), case(micro(1), Step()), case(Step()), "is off by 1"
)


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
        (case(Freeze(("nothing.*",))).to_json(), "parts without effect"),
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


def test_a_report_of_injected_faults_is_refused(tmp_path: Path):
    """The case alone would pass: the fault is no part of it."""
    file = tmp_path / "report.json"
    file.write_text(RunReport((), environment={"faults": "corrupt@rank=1,step=0"}).to_json())
    with pytest.raises(
        InvalidArgument, match=r"got one with corrupt@rank=1,step=0.* with --fault corrupt@rank=1,step=0"
    ):
        read_recorded(file)
