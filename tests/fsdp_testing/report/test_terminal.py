"""The terminal shows every verdict and every failure's facts, at any width, with and without colour."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from fsdp_testing.cases.records import CheckResult, RunReport, Verdict
from fsdp_testing.report.conformance import complete_sheet, short_sheet
from fsdp_testing.report.terminal import Output, open_console, print_sheet, say_ending


def print_report(report: RunReport, console: Console, *, full: bool = False) -> None:
    sheet = (complete_sheet if full else short_sheet)(report)
    print_sheet(sheet, console, full=full)
    say_ending(sheet, console)


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
        "max error 0.37, expected equal bits",
        "fsdp-verify run one --check training.adamw --world-size 2",
        "exit code 1",
    ):
        assert part in text, part
    for part in ("0.37 on ranks 0 and 1", "expected because: issue 1"):
        assert part in drawn(mixed, full=True), part


def test_what_is_new_comes_first_and_what_is_known_is_a_line_for_each_page(make: SimpleNamespace) -> None:
    def known(name: str, check: str, reason: str) -> CheckResult:
        return make.result(name, check, Verdict.EXPECTED_FAILURE, expected=reason, findings=(make.diverged(),))

    passed = [make.result("one", f"training.c{number}", Verdict.PASS) for number in range(40)]
    idle = [make.result("one", f"hybrid.c{number}", Verdict.NOT_CLAIMED) for number in range(40)]
    results = (
        known("one", "a.b", "weights stay: docs/stale.md"),
        known("one", "a.c", "other words: docs/stale.md"),
        known("two", "a.b", "weights stay: docs/stale.md"),
        known("two", "a.d", "nobody wrote it up"),
        make.result("two", "a.e", Verdict.FAIL, findings=(make.diverged(),)),
        *passed,
        *idle,
    )
    lines = drawn(RunReport(results)).splitlines()
    assert lines[0].startswith("new failures: 1 check, 1 cause")
    assert "    3  weights stay (one, two): docs/stale.md" in lines
    assert "    1  nobody wrote it up (two)" in lines
    assert len(lines) < 30
    assert not [line for line in lines if "hybrid.c" in line or "training.c" in line]
    assert "known failures, as expected: 4 checks, 2 reasons" in "\n".join(lines)


def test_checks_of_one_cause_are_one_account_and_many_causes_are_short(make: SimpleNamespace) -> None:
    same = [make.result("one", f"a.c{number}", Verdict.FAIL, findings=(make.diverged(),)) for number in range(3)]
    others = [
        make.result("one", f"b.c{number}", Verdict.FAIL, findings=(make.diverged(quantity=f"value {number}"),))
        for number in range(6)
    ]
    text = drawn(RunReport((*same, *others)))
    assert "new failures: 9 checks, 7 causes" in text
    assert "breaks 3 checks: a.c0, a.c1, a.c2" in text
    assert text.count("replay:") == 3
    assert all(f"b.c{number}" in text for number in range(6)), "nothing new is left out"


def test_a_failure_without_findings_and_an_unknown_verdict_are_shown(make: SimpleNamespace) -> None:
    lost = [make.result("one", f"a.c{number}", Verdict.UNKNOWN, explanation="PoolBroken: gone") for number in range(9)]
    text = drawn(RunReport((make.result("one", "b.c", Verdict.FAIL, explanation="it is wrong"), *lost)))
    assert "it is wrong" in text
    assert text.count("PoolBroken: gone") == 1
    assert "the same: a.c1, a.c2" in text


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b1A\r\x00\u202e"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_lost_at_any_width(mixed: RunReport, width: int) -> None:
    letters = "".join(drawn(mixed, width, full=True).split())
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


def test_no_name_and_no_line_can_steer_the_terminal(make: SimpleNamespace) -> None:
    """A check, an implementation, a reason, a key of the environment: whatever a report holds, and whatever is said."""
    results = [
        make.result(HOSTILE, f"s.{HOSTILE}", verdict, meaning=HOSTILE, explanation=HOSTILE) for verdict in Verdict
    ]
    report = RunReport(tuple(results), implementations=(HOSTILE,), environment={HOSTILE: HOSTILE}, backend=HOSTILE)
    for full in (False, True):
        console = Output(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
        print_report(report, console, full=full)
        console.say(HOSTILE, (HOSTILE, "bold"))
        console.print(HOSTILE, markup=False)
        text = console.file.getvalue()
        assert HOSTILE not in text
        assert not set("\x1b\x00\x07\x9b\r\u202e") & set(text)


def test_text_of_a_run_is_no_markup(make: SimpleNamespace) -> None:
    finding = make.diverged(explanation="got [bold]x[/bold] [red", detail="[/nothing]")
    report = RunReport(results=(make.result("a", "s.c", Verdict.FAIL, findings=(finding,)),))
    assert "[bold]x[/bold] [red" in drawn(report)


@pytest.mark.parametrize("columns", ["1", "2", "7"])
def test_a_terminal_without_room_gets_a_least_width(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == 20
