"""`fsdp-verify replay` of a report: a case fails as the check failed that met it, also where that asks more than numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.checks.conformance import run_conformance
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
