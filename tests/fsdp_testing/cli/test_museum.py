"""`museum`: what it tells of exhibits that are caught, that escape, and that prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from fsdp_testing.cases.records import CheckResult, Verdict
from fsdp_testing.museum import hunt as hunting
from fsdp_testing.museum import tour
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.tour import Visit


def exhibit(name: str) -> Exhibit:
    return Exhibit(name, f"title of {name}", f"story of {name}", "pytorch #1", nullcontext, ("clipping.norm_2",))


def result(verdict: Verdict) -> CheckResult:
    return CheckResult("x", "clipping.norm_2", "meaning", (), verdict)


@pytest.fixture
def collection(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts exhibits with known fates into the museum: (verdict with the bug, verdict without it)."""

    def install(**fates: tuple[Verdict, Verdict]) -> None:
        monkeypatch.setattr(tour, "exhibits", lambda: {name: exhibit(name) for name in fates})

        def visits(selection: Any, **options: Any) -> Iterator[Visit]:
            for found in selection:
                with_bug, without = fates[found.id]
                yield Visit(found, (result(with_bug),), (result(without),), None, 0.5)

        monkeypatch.setattr(tour, "tour", visits)

    return install


def test_all_caught(verify: Callable[..., Any], collection: Callable[..., None]) -> None:
    collection(B001=(Verdict.FAIL, Verdict.PASS), B002=(Verdict.FAIL, Verdict.PASS))
    ended = verify("museum")
    assert ended.code == 0, ended.err
    assert "caught  B001  title of B001" in ended.out
    assert "all 2 exhibits are caught" in ended.out


@pytest.mark.parametrize(
    ("fates", "said"),
    [
        ((Verdict.PASS, Verdict.PASS), "clipping.norm_2 does not fail on it"),
        ((Verdict.UNKNOWN, Verdict.PASS), "clipping.norm_2 does not fail on it"),
        ((Verdict.FAIL, Verdict.FAIL), "clipping.norm_2 does not pass without it"),
        ((Verdict.FAIL, Verdict.NOT_CLAIMED), "clipping.norm_2 does not pass without it"),
    ],
)
def test_one_escapes(
    verify: Callable[..., Any], collection: Callable[..., None], fates: tuple[Verdict, Verdict], said: str
) -> None:
    collection(B001=(Verdict.FAIL, Verdict.PASS), B002=fates)
    ended = verify("museum")
    assert ended.code == 1
    assert "ESCAPED B002" in ended.out
    assert said in ended.out
    assert "1 of 2 exhibits escaped" in ended.out


def test_some_are_chosen(verify: Callable[..., Any], collection: Callable[..., None]) -> None:
    collection(B001=(Verdict.FAIL, Verdict.PASS), B002=(Verdict.PASS, Verdict.PASS))
    assert verify("museum", "B001").code == 0
    ended = verify("museum", "B009")
    assert ended.code == 2
    assert "['B009']" in ended.err


def test_stories_are_told_without_running(verify: Callable[..., Any], collection: Callable[..., None]) -> None:
    collection(B001=(Verdict.PASS, Verdict.PASS))
    ended = verify("museum", "--list")
    assert ended.code == 0
    for part in ("title of B001", "story of B001", "caught by clipping.norm_2; pytorch #1"):
        assert part in ended.out


def test_an_empty_museum_shows_nothing(verify: Callable[..., Any], collection: Callable[..., None]) -> None:
    collection()
    ended = verify("museum")
    assert ended.code == 2
    assert "empty collection" in ended.err


def test_exhibits_drawn_by_a_seed_are_hunted_and_counted(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, float | None]] = []

    def pretended(exhibit: Exhibit, seed: int, *, limit: int, seconds: float | None) -> hunting.Hunt:
        asked.append((exhibit.id, seed, seconds))
        return hunting.Hunt(None if len(asked) == 2 else 24, 48, 1.5, "the first fact")

    monkeypatch.setattr(hunting, "hunt", pretended)
    ended = verify("museum", "--exhibits", "3", "--seed", "7", "--seconds", "9")
    assert ended.code == 1
    assert asked == [(exhibit.id, 7, 9.0) for exhibit in hunting.drawn_exhibits(3, 7)]
    assert "2 of 3 exhibits were met" in ended.out
    assert f"NOT MET {asked[1][0]}" in ended.out
    asked.clear()
    assert verify("museum", "--exhibits", "1", "--seed", "7").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--exhibits", "1000"), "expected 1 to"), (("B036", "--exhibits", "2"), "alone")]
)
def test_a_hunt_that_cannot_be_is_refused(verify: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ended = verify("museum", *arguments)
    assert ended.code == 2
    assert said in ended.err
