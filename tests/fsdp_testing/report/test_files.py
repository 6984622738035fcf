"""Reports appear whole or not at all, and a place that cannot be written to gives one clear message."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from fsdp_testing.cases.records import RunReport
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.report.files import check_writable, write_atomically


def test_text_arrives_with_the_usual_permissions_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder" / "file.txt"
    write_atomically(target, "é\n")
    assert target.read_bytes() == "é\n".encode()
    assert os.listdir(target.parent) == ["file.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask


def test_an_interrupted_write_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    target.write_text("before", encoding="utf-8")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdp_testing.report.files.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, "after")
    assert target.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    place = tmp_path / "file" / "inner"
    with pytest.raises(InvalidArgument, match=r"^--\w+: expected a writable path, got '.*file") as caught:
        write_atomically(place / "report", "text", "--json")
    assert "\n" not in str(caught.value)


def test_a_directory_in_the_place_of_the_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(InvalidArgument, match="--json: expected a writable path"):
        check_writable(tmp_path / "report.json", "--json")
    with pytest.raises(InvalidArgument, match="--json: expected a writable path"):
        write_atomically(tmp_path / "report.json", "x", "--json")
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_full_or_read_only_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsdp_testing.report.files.os.fsync", refuse)
    with pytest.raises(InvalidArgument, match="No space left on device"):
        write_atomically(tmp_path / "x", "text")
    assert os.listdir(tmp_path) == []


def test_looking_first_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "report.json", "--json")
    assert os.listdir(tmp_path / "new") == []
    with pytest.raises(InvalidArgument):
        check_writable(Path("/proc/nothing/report.json"), "--json")


def test_json_comes_back_equal(mixed: RunReport, good: RunReport, tmp_path: Path) -> None:
    for name, report in (("good", good), ("mixed", mixed)):
        write_atomically(tmp_path / name, report.to_json(indent=1), "--json")
    assert RunReport.from_json((tmp_path / "good").read_text(encoding="utf-8")) == good
    again = RunReport.from_json((tmp_path / "mixed").read_text(encoding="utf-8"))
    assert again.to_json() == mixed.to_json()  # nan is not equal to itself


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}'])
def test_a_damaged_report_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord, match=r"r\.json"):
        RunReport.from_json(text, "r.json")


def test_a_report_of_the_first_version_is_still_read(good: RunReport, mixed: RunReport) -> None:
    for report in (good, mixed):
        document = json.loads(report.to_json())
        document["version"] = 1
        del document["portraits"]
        for result in document["results"]:
            for finding in result["findings"]:
                del finding["cause"], finding["shortest"]
        assert RunReport.from_json(json.dumps(document)).to_json() == report.to_json()


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    for text in ("one", "two"):
        check_writable(tmp_path / "link", "--json")
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_text(encoding="utf-8") == text
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidArgument, match="expected a writable path"):
        write_atomically(tmp_path / "loop", "text")
    assert (tmp_path / "loop").is_symlink()


def test_a_pipe_gets_the_text_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe, "--json")
        write_atomically(pipe, "{}")
        assert os.read(reader, 10) == b"{}"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
