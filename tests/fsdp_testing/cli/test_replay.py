"""`fsdp-verify replay` of a report: a case fails as the check failed that met it, also where that asks more than numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.checks.conformance import run_conformance
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.cli.main import main


def test_a_case_of_a_check_that_asks_more_than_numbers_is_judged_by_that_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its numbers are right: alone it passed, and a report in which a claim is refuted was replayed with exit code 0."""
    report = run_conformance("torch-fsdp2", checks=("full_state_dict.strict",), explain=0.0)
    file = tmp_path / "report.json"
    file.write_text(report.to_json())
    assert main(["replay", str(file), "--once"]) == 1
    assert "expected it to be refused" in capsys.readouterr().out
    file.write_text(report.to_json().replace("full_state_dict.strict", "full_state_dict.of_another_version"))
    assert main(["replay", str(file), "--once"]) == 3
    assert (
        "full_state_dict.of_another_version, which the case failed, is not a check of this version"
        in capsys.readouterr().out
    )


def test_a_case_that_fails_as_known_is_told_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The forward leaves out the module that raises, so that the micro-batch leaves all its gradients."""
    (rule,) = (r for r in shipped_known("torch-fsdp2").rules if r.name == "reset-keeps-a-whole-micro-batch")
    file = tmp_path / "case.json"
    file.write_text(rule.example)
    assert main(["replay", str(file), "--once", "--implementation", "torch-fsdp2"]) == 1
    shown = capsys.readouterr().out
    assert "still contains operation 0, interrupt, which was cleared" in shown
    assert f"known failure: {rule.reason} {rule.page}" in shown
