"""Long work shows how far it is: a line that moves in a terminal, lines in a log file."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from fsdp_testing.cases.records import CheckResult, RunReport
from fsdp_testing.report import progress
from fsdp_testing.report.progress import Display, ProgressListener
from fsdp_testing.report.terminal import Output


def lines_of(console: Output) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [re.sub(r"^ *\d+\.\d s  ", "", line) for line in console.file.getvalue().splitlines()]


def test_a_log_has_a_line_for_each_stage_and_one_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Output(file=io.StringIO(), width=80, color_system=None)
    with Display(console, "cells") as display:
        display.stage("running cells", 1000)
        for now[0], *shown in ((29.0, 10, "", 1000), (31.0, 20, "3 fail", 1000), (60.0, 30, "", 1000), (61.5, 1400)):
            display.at(*shown)
        now[0] = 62.0
        display.stage("looking for causes")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "   0.0 s  running cells",
        "  31.0 s  20 of 1,000 cells, 3 fail, about 51 min left",
        "  61.5 s  1,400 cells",
        "  62.0 s  looking for causes",
    ]


def test_what_is_left_is_estimated_from_the_pace_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that earlier runs did took no time in this one."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Output(file=io.StringIO(), width=100)
    with Display(console, "cells") as display:
        display.stage("running", 1100)
        display.at(100, "", 1100)
        for second in (1, 4, 5):
            now[0] = float(second)
            display.at(100 + 2 * second, "", 1100)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split("s  ")[1] for line in lines] == ["running", "108 of 1,100 cells, about 8 min left"]


def test_a_terminal_shows_stage_and_count_and_no_log() -> None:
    console = Output(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Display(console, "cells") as display:
        display.stage("running cells", 1000)
        display.at(20, "3 fail", total=1000)
        display._progress.refresh()
    assert isinstance(console.file, io.StringIO)
    assert "running cells: 20 of 1,000 cells, 3 fail" in console.file.getvalue()
    assert " s  running" not in console.file.getvalue()


def lines_of_progress(results: Iterable[CheckResult], *, at_once: bool = False) -> list[str]:
    """What a log file shows of a run; `at_once`: everything is started before anything is finished."""
    console, results = Output(file=io.StringIO(), width=80, color_system=None), list(results)
    with ProgressListener(console) as listener:
        listener.planned(len(results))
        for found in results if at_once else ():
            listener.started(found.implementation, found.check)
        for found in results:
            if not at_once:
                listener.started(found.implementation, found.check)
            listener.finished(found)
    return lines_of(console)


def test_progress_without_a_terminal_is_a_line_for_each_suite_and_trouble(mixed: RunReport) -> None:
    lines = lines_of_progress(mixed.results)
    assert lines[:2] == [
        "starting ranks and examining the adapters",
        "8 checks to run; a line for each finished suite",
    ], "both come before anything is run"
    assert [line.split(":")[0] for line in lines[2:]] == [
        "FAIL one training.adamw",
        "one training",
        "unknown one clip.inf",
        "stale one clip.one",
        "one clip",
        "FAIL two & co training.sgd",
        "two & co training",
        "looking for the causes of what failed (3 checks)",
    ]
    assert lines[3] == "one training: 1 pass, 1 FAIL (0.8 s); 2 of 8 checks"
    assert lines[6] == "one clip: 1 unknown, 1 expected, 1 stale (1.2 s); 5 of 8 checks"


def test_every_suite_is_counted_once_where_checks_run_side_by_side(mixed: RunReport) -> None:
    lines = [line for line in lines_of_progress(mixed.results, at_once=True) if " of 8 checks" in line]
    assert sorted(line.split(" (")[0] for line in lines) == [
        "one clip: 1 unknown, 1 expected, 1 stale",
        "one training: 1 pass, 1 FAIL",
        "two & co training: 1 pass, 1 FAIL",
    ]


def test_progress_in_a_terminal_moves_and_cleans_up(mixed: RunReport) -> None:
    console = Output(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with ProgressListener(console) as listener:
        listener.planned(len(mixed.results))
        for found in mixed.results:
            listener.started(found.implementation, found.check)
            listener.finished(found)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "FAIL one training.adamw" in text
    assert text.count("\x1b[?25h") == 1, "the cursor is shown again"


def test_progress_survives_an_interrupt(make: SimpleNamespace) -> None:
    console = Output(file=io.StringIO(), width=100, force_terminal=True, color_system=None)

    def interrupted() -> None:
        with ProgressListener(console) as listener:
            listener.planned(3)
            listener.started("a", "s.c")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\x1b[?25h") == 1
