"""The JUnit file says what the report says, and stays XML whatever the run printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

from fsdp_testing.cases.records import RunReport, Verdict
from fsdp_testing.report.files import write_atomically
from fsdp_testing.report.junit import junit_text


def test_every_verdict_has_its_element(mixed: RunReport) -> None:
    root = ET.fromstring(junit_text(mixed).encode())
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["one", "two & co"]
    kinds = {
        (suite.get("name"), case.get("name")): [(child.tag, child.get("type")) for child in case]
        for suite in suites
        for case in suite.findall("testcase")
    }
    assert kinds == {
        ("one", "training.sgd"): [],
        ("one", "training.adamw"): [("failure", "fail")],
        ("one", "clip.inf"): [("error", "unknown")],
        ("one", "clip.two"): [("skipped", "expected_failure")],
        ("one", "clip.one"): [("system-out", None)],
        ("one", "hybrid.steps"): [("skipped", "not_claimed")],
        ("two & co", "training.sgd"): [("failure", "fail")],
        ("two & co", "training.adamw"): [],
    }


def test_totals_agree_with_the_elements(mixed: RunReport) -> None:
    for suite in ET.fromstring(junit_text(mixed).encode()).findall("testsuite"):
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        for total, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert suite.get(total) == str(sum(case.find(tag) is not None for case in cases)), tag


def test_a_failure_is_told_completely(mixed: RunReport) -> None:
    root = ET.fromstring(junit_text(mixed).encode())
    failure = root.find("testsuite[@name='one']/testcase[@name='training.adamw']/failure")
    assert failure is not None
    assert failure.text is not None
    for part in (
        "gradient of blocks.1.weight",
        "operation 0 forward_backward(batch 1), ranks 0, 1",
        "max error 0.37, bound 2e-12",
        "replay: fsdp-verify run one --check training.adamw --world-size 2",
    ):
        assert part in failure.text


def test_the_file_is_utf8_xml(mixed: RunReport, tmp_path: Path) -> None:
    write_atomically(tmp_path / "junit.xml", junit_text(mixed))
    assert ET.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"


def test_an_implementation_of_which_nothing_was_checked_is_an_error(make: SimpleNamespace) -> None:
    report = RunReport((make.result("a", "s.one", Verdict.NOT_CLAIMED),), ("a", "never ran"))
    first, second = ET.fromstring(junit_text(report).encode()).findall("testsuite")
    assert (first.get("tests"), first.get("skipped"), first.get("errors")) == ("2", "1", "1")
    assert (second.get("tests"), second.get("errors")) == ("1", "1")
    assert first.findall("testcase")[1][0].get("message") == "no claim was checked: no verdict"
    part = RunReport(report.results, report.implementations, shard=(1, 2))
    assert "no claim" not in junit_text(part)
