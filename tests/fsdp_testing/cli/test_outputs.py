"""Every command ends alike: printed, written, named, and the exit code in the last line; bad places are refused before."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.report.sheet import Line, Sheet
from fsdp_testing.report.terminal import open_console

SHEET = Sheet("a title", 3, "one has no verdict", lead=(Line("it was looked at"),))


def parsed(*arguments: str) -> argparse.Namespace:
    command = argparse.ArgumentParser()
    add_html(command)
    add_json(command, "it")
    return command.parse_args(arguments)


def test_a_folder_gets_a_page_and_a_page_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "was.html").mkdir()
    for given, written in (("p", "p/index.html"), ("q.html", "q.html"), ("was.html", "was.html/index.html")):
        paths = checked_outputs(parsed("--html", str(tmp_path / given)))
        assert paths == {"--html": tmp_path / written}
    assert checked_outputs(parsed()) == {}


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_place_that_cannot_be_written_to_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=f"^{option}: expected a writable path"):
        checked_outputs(parsed(option, str(tmp_path / "file" / "inner")))


def test_what_is_written_is_named_and_the_last_line_has_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    paths = checked_outputs(parsed("--html", str(tmp_path), "--json", str(tmp_path / "all.json")))
    code = present(SHEET, open_console(), paths, {"--json": lambda: "{}"})
    assert code == 3
    assert capsys.readouterr().out.splitlines() == [
        "it was looked at",
        f"written: {tmp_path / 'index.html'}",
        f"written: {tmp_path / 'all.json'}",
        "exit code 3: one has no verdict",
    ]
    assert (tmp_path / "all.json").read_text() == "{}"
    page = (tmp_path / "index.html").read_text()
    assert '<p class="banner unknown">Exit code 3: one has no verdict.</p>' in page
    assert "it was looked at" in page
    assert sorted(os.listdir(tmp_path)) == ["all.json", "index.html"]


def test_a_github_job_gets_what_is_printed_as_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    fenced = Sheet("a title", 1, "one fails", lead=(Line("got ```` from a rank"),))
    assert present(fenced, open_console(), {}, {}) == 1
    lines = page.read_text().splitlines()
    assert lines[:5] == ["before", "### a title", "", "exit code 1: one fails", ""]
    assert lines[5:8] == ["`````text", "got ```` from a rank", ""]
    assert lines[8] == "`````", "longer than any fence inside"

    page.unlink()
    assert present(SHEET, open_console(), {}, {}) == 3
    assert page.read_text().count("```") == 2, "a fence where nothing asks for a longer one"

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary.md"))
    capsys.readouterr()
    assert present(SHEET, open_console(), {}, {}) == 3
    assert "not written: GITHUB_STEP_SUMMARY" in capsys.readouterr().out


def test_two_outputs_in_one_file_are_refused(tmp_path: Path) -> None:
    same = str(tmp_path / "same.html")
    with pytest.raises(InvalidArgument, match=r"--html and --json: expected a file for each, got '.*' for 2"):
        checked_outputs(parsed("--html", same, "--json", same))


def test_an_output_that_fails_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = {"--html": tmp_path / "file" / "index.html", "--json": tmp_path / "all.json"}
    with pytest.raises(InvalidArgument, match="^--html: expected a writable path"):
        present(SHEET, open_console(), paths, {"--json": lambda: "{}"})
    assert (tmp_path / "all.json").read_text(encoding="utf-8") == "{}"
