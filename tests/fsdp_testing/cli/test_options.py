"""Options that several commands have: what they accept, and that old spellings still work and say so."""

from __future__ import annotations

import argparse

import pytest

from fsdp_testing.cli import options


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="fsdp-verify try", allow_abbrev=False)
    options.add_old_spelling(command, "--deadline", options.add_timeout(command, 60.0))
    options.add_world_sizes(command, "numbers of ranks", (2,))
    options.add_seed(command, "of all choices")
    return command


def test_the_defaults() -> None:
    assert vars(parser().parse_args([])) == {"timeout": 60.0, "world_size": (2,), "seed": 0}


def test_an_old_spelling_sets_the_same_value_and_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser().parse_args(["--deadline", "7.5"]).timeout == 7.5
    said = capsys.readouterr().err
    assert said == "fsdp-verify: --deadline is called --timeout now; the next version will not know the old name\n"
    assert parser().parse_args(["--timeout", "7.5"]).timeout == 7.5
    assert not capsys.readouterr().err


def test_an_old_spelling_is_checked_as_the_new_one_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--deadline", "0"])
    assert "got '0'" in capsys.readouterr().err
    assert "--deadline" not in parser().format_help()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeout", "inf"], "got 'inf'"),
        (["--timeout", "soon"], "got 'soon'"),
        (["--world-size", "0"], "at least 1"),
        (["--world-size", "2,x"], "got '2,x'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(arguments)
    assert said in capsys.readouterr().err


def test_counts_are_whole_numbers_of_at_least_one() -> None:
    assert options.count("3") == 3
    for text in ("0", "-2", "1.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            options.count(text)


def test_sizes_are_kept_in_order_each_once() -> None:
    assert options.sizes("3,2,3") == (3, 2)
