"""A report for continuous-integration servers: JUnit XML, one suite per implementation.

`pass` is a passed test; `fail` a failure; `unknown` an error; `not claimed` and an expected failure are skipped, with
the reason; a stale expectation passes and says so in its output. An implementation without a checked claim gets an error beside
its skipped tests, because the run has no verdict on it.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from fsdp_testing.cases.records import CheckResult, RunReport, Verdict
from fsdp_testing.report.summary import (
    accounts,
    idle,
    implementations,
    place_text,
    replay_line,
    sentence,
    size_text,
    suite_of,
)

_OUTCOMES = {
    Verdict.FAIL: ("failure", "fail"),
    Verdict.UNKNOWN: ("error", "unknown"),
    Verdict.NOT_CLAIMED: ("skipped", "not_claimed"),
    Verdict.EXPECTED_FAILURE: ("skipped", "expected_failure"),
}
"""Element and type of each verdict other than a passed test."""

# XML 1.0 cannot hold these even escaped: control characters of captured output, lone surrogates.
UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(report: RunReport) -> str:
    """Return the XML document."""
    root = ET.Element("testsuites", name="fsdp-verify", time=f"{report.seconds:.3f}")
    for name in implementations(report):
        results = [result for result in report.results if result.implementation == name]
        unasked = name in idle(report)
        suite = ET.SubElement(root, "testsuite", {"name": _clean(name), **_counts(results, unasked)})
        properties = ET.SubElement(suite, "properties")
        for key, value in [*report.environment.items(), ("backend", report.backend)]:
            ET.SubElement(properties, "property", name=_clean(key), value=_clean(value))
        for result in results:
            suite.append(_test_case(result, report))
        if unasked:
            case = ET.SubElement(suite, "testcase", classname=_clean(name), name="any claim", time="0.000")
            ET.SubElement(case, "error", message="no claim was checked: no verdict", type="unknown")
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _counts(results: list[CheckResult], unasked: bool) -> dict[str, str]:
    verdicts = [result.verdict for result in results]
    return {
        "tests": str(len(results) + unasked),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.UNKNOWN) + unasked),
        "skipped": str(verdicts.count(Verdict.NOT_CLAIMED) + verdicts.count(Verdict.EXPECTED_FAILURE)),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }


def _test_case(result: CheckResult, report: RunReport) -> ET.Element:
    case = ET.Element(
        "testcase",
        classname=_clean(f"{result.implementation}.{suite_of(result.check)}"),
        name=_clean(result.check),
        time=f"{result.seconds:.3f}",
    )
    if result.verdict in _OUTCOMES:
        tag, kind = _OUTCOMES[result.verdict]
        message = result.expected if result.verdict is Verdict.EXPECTED_FAILURE else sentence(result)
        outcome = ET.SubElement(case, tag, message=_clean(message), type=kind)
        if tag != "skipped":
            outcome.text = _account(result, report)
    elif result.verdict is Verdict.STALE:
        ET.SubElement(case, "system-out").text = _clean(f"stale expected failure: {result.expected}")
    return case


def _account(result: CheckResult, report: RunReport) -> str:
    lines = [result.meaning, *filter(None, [result.remark])]
    for finding in result.findings:
        facts = (finding.explanation, place_text(finding), finding.quantity, size_text(finding), finding.detail)
        lines += ["", *(line for line in facts if line)]
    lines += accounts(result)
    return _clean("\n".join([*lines, "", f"replay: {replay_line(result, report)}"]))


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)
