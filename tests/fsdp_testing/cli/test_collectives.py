"""`doctor --backend`: a wrong number, a refusal and lost ranks are told apart, each with its collective and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fsdp_testing
from fsdp_testing.base import backends
from fsdp_testing.base.backends import Backend
from fsdp_testing.cli import collectives
from fsdp_testing.errors import WorldFailed


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A vendor's backend; its ranks, and gloo's, are not started."""
    monkeypatch.setitem(backends._registered, "other", Backend("other", "cpu", lambda size: None, "gloo"))
    return "other"


def answers(monkeypatch: pytest.MonkeyPatch, changed: Callable[[str, dict[str, list[str]]], None]) -> None:
    """All ranks give the same numbers, but where `changed` puts in what the other backend gives for a collective."""

    def ranks(function: Any, collective: str, device: str, *, backend: str, **_: Any) -> list[dict[str, list[str]]]:
        made: list[dict[str, list[str]]] = [
            {dtype: ["[1.0]... (abc)"] * len(collectives.SIZES) for dtype in collectives.DTYPES} for _ in range(2)
        ]
        if backend == "other":
            changed(collective, made[1])
        return made

    monkeypatch.setattr(fsdp_testing, "run_ranks", ranks)


def test_gloo_is_equal_to_itself(verify: Callable[..., Any]) -> None:
    ended = verify("doctor", "--backend", "gloo")
    assert ended.code == 0, ended.out
    count = len(collectives.COLLECTIVES) * len(collectives.DTYPES)
    assert ended.out.splitlines()[-1].startswith(f"exit code 0: gloo: {count} of {count} equal to gloo")


def test_a_wrong_number_is_named_with_both(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    def changed(collective: str, rank: dict[str, list[str]]) -> None:
        if collective == "broadcast":
            rank["bfloat16"][1] = "[2.0]... (abd)"

    answers(monkeypatch, changed)
    ended = verify("doctor", "--backend", other)
    assert ended.code == 1
    assert (
        "broadcast, bfloat16: WRONG: 1,023 elements: gloo gives rank 0 [1.0]... (abc) and rank 1 [1.0]... (abc), "
        "this backend gives rank 0 [1.0]... (abc) and rank 1 [2.0]... (abd)"
    ) in ended.out
    assert "53 of 54 equal to gloo at 3 sizes, 1 wrong or lost" in ended.out


def test_what_it_refuses_is_no_wrong_number(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    def changed(collective: str, rank: dict[str, list[str]]) -> None:
        rank["uint8"][0] = "refused: RuntimeError: no bytes"

    answers(monkeypatch, changed)
    ended = verify("doctor", "--backend", other)
    assert ended.code == 0
    assert "reduce, uint8: refuses: RuntimeError: no bytes" in ended.out
    assert "45 of 54 equal" in ended.out


def test_lost_ranks_are_broken_and_the_rest_is_asked(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    def changed(collective: str, rank: dict[str, list[str]]) -> None:
        if collective == "reduce":
            raise WorldFailed("rank 1 hung\nat length")

    answers(monkeypatch, changed)
    ended = verify("doctor", "--backend", other)
    assert ended.code == 1
    assert "reduce, int64: LOST: rank 1 hung" in ended.out
    assert "48 of 54 equal" in ended.out


@pytest.mark.parametrize(("name", "said"), [("fake", "collectives between ranks"), ("absent", "expected one of")])
def test_what_cannot_be_compared_is_bad_usage(verify: Callable[..., Any], name: str, said: str) -> None:
    ended = verify("doctor", "--backend", name)
    assert ended.code == 2
    assert said in ended.err
