"""`museum`: what it tells of planted bugs that are caught, that escape, and that prove nothing; and where it has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_testing.cli import museum

BROKEN = str(Path(__file__).parents[2] / "quality" / "broken")


@pytest.fixture
def tests_of_checkout(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(sys, "path", [BROKEN, *sys.path])
    import hunting
    import proving

    return SimpleNamespace(hunting=hunting, proving=proving, monkeypatch=monkeypatch)


@pytest.fixture
def fates(tests_of_checkout: Any) -> Callable[..., None]:
    """Gives planted bugs known fates, by number: (checks that missed it, checks that fail without it too)."""
    proving = tests_of_checkout.proving

    def install(**known: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        bugs = {bug: proving.BUGS[bug] for bug in known}
        tests_of_checkout.monkeypatch.setattr(proving, "BUGS", bugs)

        def prove(names: list[str], **_: Any) -> Iterator[Any]:
            for name in names:
                yield proving.Proof(name, *known[proving.FAULTS[name].bug], 0.5)

        tests_of_checkout.monkeypatch.setattr(proving, "prove", prove)

    return install


def test_all_caught(verify: Callable[..., Any], fates: Callable[..., None]) -> None:
    fates(B054=((), ()), B147=((), ()))
    ended = verify("museum")
    assert ended.code == 0, ended.err
    assert "caught  B147  each rank clips by the norm of its own shard" in ended.out
    assert "caught by clipping.norm_inf" in ended.out
    assert "all 2 exhibits are caught" in ended.out


@pytest.mark.parametrize(
    ("fate", "told"),
    [
        ((("clipping.norm_2",), ()), "clipping.norm_2 does not fail on it"),
        (((), ("clipping.norm_2",)), "clipping.norm_2 does not pass without it"),
    ],
)
def test_one_escapes(verify: Callable[..., Any], fates: Callable[..., None], fate: Any, told: str) -> None:
    fates(B054=((), ()), B147=fate)
    ended = verify("museum")
    assert ended.code == 1
    assert "ESCAPED B147" in ended.out
    assert told in ended.out
    assert "1 of 2 exhibits escaped" in ended.out


def test_some_are_chosen(verify: Callable[..., Any], fates: Callable[..., None]) -> None:
    fates(B054=((), ()), B147=(("clipping.norm_2",), ()))
    assert verify("museum", "B054").code == 0
    ended = verify("museum", "B009")
    assert ended.code == 2
    assert "['B009']" in ended.err


def test_stories_are_told_without_running(verify: Callable[..., Any]) -> None:
    ended = verify("museum", "--list", "B147", "faults_gradients:SumForMean")
    assert ended.code == 0
    for part in (
        "B147  each rank clips by the norm of its own shard (silently wrong, in fsdp_ref-wrapper)",
        "The norm was read from the local part of a sharded tensor",
        "caught by clipping.norm_1, clipping.norm_2, clipping.norm_inf; pytorch issue 170862",
        "faults_gradients:SumForMean (silently wrong, in toy:UNBROKEN)",
    ):
        assert part in ended.out


@pytest.mark.parametrize("command", [("museum",), ("fuzz",)])
def test_bugs_drawn_by_a_seed_are_hunted_and_counted(
    verify: Callable[..., Any], tests_of_checkout: Any, command: tuple[str, ...]
) -> None:
    hunting = tests_of_checkout.hunting
    hunted: list[tuple[str, int, float]] = []

    def pretended(name: str, seed: int, *, limit: int, seconds: float) -> Any:
        hunted.append((name, seed, seconds))
        return hunting.Hunt(None if len(hunted) == 2 else 24, 48, 1.5, "the first fact")

    tests_of_checkout.monkeypatch.setattr(hunting, "hunt", pretended)
    ended = verify(*command, "--exhibits", "3", "--seed", "7", "--seconds", "9")
    assert ended.code == 1
    assert hunted == [(name, 7, 9.0) for name in hunting.drawn_bugs(3, 7)]
    assert "2 of 3 exhibits were met" in ended.out
    assert "NOT MET" in ended.out
    assert ("fuzz --exhibits is called museum --exhibits now" in ended.err) == (command == ("fuzz",))
    hunted.clear()
    assert verify(*command, "--exhibits", "1", "--seed", "7").code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("museum", "--exhibits", "1000"), "expected 1 to"),
        (("fuzz", "--exhibits", "1000"), "expected 1 to"),
        (("museum", "B036", "--exhibits", "2"), "alone"),
        (("museum", "--exhibits", "none"), "at least 1"),
        (("museum", "--nothing"), "--nothing"),
    ],
)
def test_bad_usage_ends_with_2(verify: Callable[..., Any], arguments: tuple[str, ...], told: str) -> None:
    ended = verify(*arguments)
    assert ended.code == 2
    assert told in ended.err


def test_help_is_that_of_the_checkout(verify: Callable[..., Any]) -> None:
    ended = verify("museum", "--help")
    assert ended.code == 0
    assert "--exhibits N" in ended.out


def test_an_installed_package_says_where_the_museum_is(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(museum, "museum", lambda: tmp_path / "museum.py")
    for arguments in (("museum",), ("fuzz", "--exhibits", "1")):
        ended = verify(*arguments)
        assert ended.code == 2
        assert "clone the repository" in ended.err
