"""What a process of a test class reports of its end: exit codes as a process has them, exceptions as the test raised them."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable

import pytest

from fsdp_testing.plugin.test_classes.in_rank import exit_of
from fsdp_testing.plugin.test_classes.processes import Ended
from fsdp_testing.ranks.pool import Failed


def skip() -> None:
    try:
        raise unittest.SkipTest("a reason")
    except unittest.SkipTest:
        sys.exit(86)


def fail_by_exit_code() -> None:
    try:
        raise ValueError("the test's own")
    except ValueError:
        sys.exit(10)


@pytest.mark.parametrize(
    ("call", "ended"),
    [
        (lambda: None, Ended(0)),
        (sys.exit, Ended(0)),
        (lambda: sys.exit(0), Ended(0)),
        (lambda: sys.exit(74), Ended(74)),
        (skip, Ended(86, "a reason")),
        (lambda: sys.exit(3), Failed(Ended(3))),
        (lambda: sys.exit("a message"), Failed(Ended(1))),
        (lambda: sys.exit(10), Failed(Ended(10))),
    ],
)
def test_ends(call: Callable[[], None], ended: object) -> None:
    assert exit_of(call, 10, frozenset({74, 86})) == ended


def _run() -> None:
    sys.exit(0)


@pytest.mark.parametrize("code", [0, None, False])
def test_a_test_that_exits_has_not_passed(code: object) -> None:
    def body() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    def call() -> None:
        body()

    with pytest.raises(SystemExit):
        exit_of(call, 10, frozenset({74}))
    assert exit_of(call, 10, frozenset({0})) == exit_of(call, 10, None) == Ended(0), "declared by the test"


def test_a_class_may_end_its_own_call_by_an_exit() -> None:
    assert exit_of(_run, 10, frozenset()) == Ended(0)


def test_any_end_is_quiet_where_the_test_declares_all_good() -> None:
    assert exit_of(lambda: sys.exit(3), 10, None) == Ended(3)


def test_the_exception_behind_the_exit_code_comes_out() -> None:
    with pytest.raises(ValueError, match="the test's own"):
        exit_of(fail_by_exit_code, 10, frozenset())
    with pytest.raises(KeyError):
        exit_of(lambda: {}["k"], 10, frozenset())
