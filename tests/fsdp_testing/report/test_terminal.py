"""The terminal shows every verdict and every failure's facts, at any width, with and without colour."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from fsdp_testing.records import RunReport, Verdict
from fsdp_testing.report.progress import ProgressListener
from fsdp_testing.report.terminal import open_console, print_report


def drawn(report: RunReport, width: int = 120, *, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console, full=full)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_good_report(good: RunReport) -> None:
    text = drawn(good)
    assert "sgd" in text
    assert "not claimed" in text
    assert "2 of 2 claims hold, 1 not claimed" in text
    assert "torch 2.13.0+cpu" in text
    assert "gloo on worlds of 2, 3" in text
    assert text.rstrip().endswith("exit code 0: all claims that were checked hold")


def test_a_failure_shows_where_what_by_how_much_and_how_to_replay(mixed: RunReport) -> None:
    text = drawn(mixed)
    for part in (
        "operation 0 forward_backward(batch 1), ranks 0, 1",
        "gradient of blocks.1.weight",
        "max error 0.37, bound 2e-12 (1.85e+11 times the bound)",
        "12 roundings x u(float64)",
        "max error 0.37, equal bits were due",
        "also: mlp, 2 ranks, full_shard, float64: after operation 0 the gradient",
        "fsdp-verify run one --check training.adamw --world-size 2",
        "expected because: issue 1",
        "exit code 1",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_lost_at_any_width(mixed: RunReport, width: int) -> None:
    letters = "".join(drawn(mixed, width).split())
    for part in ("FAIL", "unknown", "stale", "expected", "training", "adamw", "gradientofblocks.1.weight"):
        assert part in letters


def test_many_implementations_are_numbered_where_names_do_not_fit(make: SimpleNamespace) -> None:
    names = [f"implementation-{number}" for number in range(1, 9)]
    verdicts = [*Verdict, Verdict.PASS]
    results = tuple(make.result(name, "sizes.rather_long_name", v) for name, v in zip(names, verdicts, strict=False))
    report = RunReport(results=results, implementations=tuple(names))
    lines = drawn(report, 80).splitlines()
    assert lines[0].split() == ["check", *"12345678"]
    assert lines[2].split() == ["rather_long_name", "pass", "FAIL", "???", "-", "exp.", "stale", "pass", "."]
    assert "columns: 1 implementation-1, 2 implementation-2" in lines[3]
    wide = drawn(report, 240).splitlines()
    assert wide[0].split() == ["check", *names]
    assert "not claimed" in wide[2]


def test_long_accounts_are_shortened_unless_asked_for(mixed: RunReport) -> None:
    text = drawn(mixed)
    assert "64 lines left out" in text
    assert "line 40" not in text
    assert "line 40" in drawn(mixed, full=True)


@pytest.mark.parametrize("width", [20, 80])
def test_a_replay_line_can_be_copied_at_any_width(mixed: RunReport, width: int) -> None:
    assert "  replay: fsdp-verify run one --check training.adamw --world-size 2\n" in drawn(mixed, width)


def test_a_log_without_a_width_gets_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == 120
    monkeypatch.setenv("COLUMNS", "77")
    assert open_console().width == 77


def test_text_of_a_run_cannot_steer_the_terminal(mixed: RunReport) -> None:
    assert "[31m" in drawn(mixed)
    assert not set("\x1b\x00\r") & set(drawn(mixed))


def test_text_of_a_run_is_no_markup(make: SimpleNamespace) -> None:
    finding = make.diverged(explanation="got [bold]x[/bold] [red", detail="[/nothing]")
    report = RunReport(results=(make.result("a", "s.c", Verdict.FAIL, findings=(finding,)),))
    assert "[bold]x[/bold] [red" in drawn(report)


def test_progress_without_a_terminal_is_one_line_per_trouble_and_implementation(mixed: RunReport) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with ProgressListener(console) as listener:
        listener.planned(len(mixed.results))
        for found in mixed.results:
            listener.started(found.implementation, found.check)
            listener.finished(found)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "FAIL one training.adamw",
        "unknown one clip.inf",
        "stale one clip.one",
        "one",
        "FAIL two & co training.sgd",
        "two & co",
    ]
    assert lines[3] == "one: 1 pass, 1 FAIL, 1 unknown, 1 not claimed, 1 expected, 1 stale"


def test_progress_in_a_terminal_moves_and_cleans_up(mixed: RunReport) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
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
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)

    def interrupted() -> None:
        with ProgressListener(console) as listener:
            listener.planned(3)
            listener.started("a", "s.c")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\x1b[?25h") == 1
