"""Marker and option validation, without pytest around it."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin.marker import Defaults, WorldRequest, read_defaults, read_marker

BACKENDS = ("gloo", "nccl", "fake")


def read(*args: Any, defaults: Defaults | None = None, **kwargs: Any) -> Any:
    return read_marker(
        args, kwargs, where="t.py::test: marker world", defaults=defaults or Defaults(), backends=BACKENDS
    )


def test_what_is_left_out_comes_from_the_defaults() -> None:
    asked = read(defaults=Defaults((3, 4), "fake", None, fresh=True))
    assert asked.sizes == (3, 4)
    assert asked.listed
    assert asked.at(3) == WorldRequest(3, "fake", None, "fresh", 0)


def test_one_size_is_no_list_and_a_list_of_one_is() -> None:
    assert (read(2).listed, read([2]).listed, read().listed) == (False, True, False)


def test_the_marker_overrides_the_defaults_but_fresh_stays_fresh() -> None:
    asked = read(2, "gloo", 5, "warm", defaults=Defaults((9,), "nccl", 1.0, fresh=True)).at(2)
    assert asked == WorldRequest(2, "gloo", 5.0, "fresh", None)


def test_no_deadline_can_be_asked_for() -> None:
    assert read(2, timeout=None).timeout is None


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None, [], [2, 0], [2, 2], {2}])
def test_a_size_is_a_positive_whole_number_or_a_list_of_different_ones(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected (size|different sizes)"):
        read(size)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "1", []])
def test_a_timeout_is_a_positive_finite_number(timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected timeout"):
        read(2, timeout=timeout)


@pytest.mark.parametrize(("backend", "rank"), [("gloo", 0), ("fake", -1), ("fake", 2), ("fake", "0"), ("fake", True)])
def test_a_rank_is_one_of_a_fake_world(backend: str, rank: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected rank"):
        read(2, backend, rank=rank)


def test_every_offence_is_listed_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(-1, "glue", "soon", "cold")
    text = str(caught.value)
    assert text.startswith("t.py::test: marker world: ")
    for part in ("size", "backend", "timeout", "isolation"):
        assert f"expected {part} " in text
    assert text.endswith("isolation='fresh').")


def test_every_option_is_validated_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_defaults("2,x", "glue", "-3", "cold", BACKENDS)
    for option in ("--world-size", "--dist-backend", "--rank-timeout", "--isolation"):
        assert f"{option}: expected" in str(caught.value)


def test_options_give_defaults() -> None:
    assert read_defaults("2,4,2", "fake", "0", "fresh", BACKENDS) == Defaults((2, 4), "fake", None, fresh=True)
    assert read_defaults(None, None, None, None, ()) == Defaults((2,), "gloo", 60.0, fresh=False)


@pytest.mark.parametrize("timeout", ["nan", "inf", "", "1s"])
def test_a_deadline_must_be_a_finite_number(timeout: str) -> None:
    with pytest.raises(InvalidArgument, match="--rank-timeout"):
        read_defaults(None, None, timeout, None, BACKENDS)
