"""Runs the checks of one test function in parallel, while pytest asks for one after another.

The first call has the checks of all its tests judged, up to `--check-jobs` at a time; each call waits for its own. Ranks get the
environment, directory and `sys.path` of this process, so a check judged ahead counts only while these are unchanged.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_testing.base import env
from fsdp_testing.cases.records import CheckResult
from fsdp_testing.checks.conformance import shared_runner
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.worlds import capacity
from fsdp_testing.ranks.pool import default_pool

if TYPE_CHECKING:
    from fsdp_testing.plugin.conformance_checks import BoundCheck

NAME = "fsdp_testing.checks_ahead"
Answer = CheckResult | Exception


class ChecksAhead:
    """The checks of the function whose tests run now; a plugin of one session.

    Args:
        asked: How many at a time; None for as many as keep the processors busy.
    """

    def __init__(self, asked: int | None) -> None:
        self._asked = asked
        self._item: pytest.Item | None = None
        self._functions: dict[pytest.Item, Sequence[pytest.Item]] = {}
        self._function: Sequence[pytest.Item] = ()
        self._answers: Generator[Answer] | None = None
        self._taken = 0
        self._given: Hashable = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Find the tests of each function; end checks that still run at the end of the session."""
        for _, tests in itertools.groupby(session.items, _function_of):
            checks: Sequence[pytest.Item] = [
                item for item in tests if check_of(item) is not None and item.get_closest_marker("skip") is None
            ]
            self._functions.update(dict.fromkeys(checks, checks))
        try:
            for checks in self._functions.values():
                self._jobs(checks)
        except InvalidArgument as error:
            raise pytest.UsageError(f"--check-{error}") from None
        _CURRENT.append(self)
        try:
            return (yield)
        finally:
            _CURRENT.remove(self)
            self._end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Note the running test; drop results of other functions."""
        self._item = item
        function = self._functions.get(item, ())
        if function is not self._function:
            self._end()
            self._function, self._taken = function, 0

    def answer(self, check: BoundCheck) -> CheckResult:
        """Return the result of a check that the running test calls."""
        item, now = self._item, _circumstances()
        if item is None or check_of(item) is not check or item not in self._function[self._taken :]:
            return check.judged()  # belongs to no test, or is called again
        first = self._function.index(item)
        if self._answers is None and not self._taken:
            tasks = [partial(_tried, check_of(later).judged) for later in self._function[first:]]
            self._answers = shared_runner().side_by_side(tasks, self._jobs(self._function))
            self._taken, self._given = first, now
        passed_over, self._taken = first - self._taken, first + 1
        if now != self._given:
            self._end()
        if self._answers is None:
            return check.judged()
        try:
            for _ in range(passed_over):  # tests that did not call theirs
                next(self._answers)
            answer: Answer = next(self._answers)
        except BaseException:  # Ctrl-C or the test's time limit: running checks have been ended
            self._end()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _jobs(self, checks: Sequence[pytest.Item]) -> int:
        hosts = default_pool().hosts
        largest = max(max(check_of(item).world_sizes, default=1) for item in checks)
        return capacity(largest, hosts.processors if hosts is not None else None).jobs(self._asked)

    def _end(self) -> None:
        if self._answers is not None:
            self._answers.close()
            self._answers = None


_CURRENT: list[ChecksAhead] = []


def result_of(check: BoundCheck) -> CheckResult:
    """Return the result of a check, judged in parallel with the other checks of its function if the session does so."""
    return _CURRENT[-1].answer(check) if _CURRENT else check.judged()


def check_of(item: pytest.Item) -> Any:
    """Return the check that a test was given by `parametrize_with_checks`; None if it has none."""
    given = getattr(item, "callspec", None)
    return None if given is None else next((v for v in given.params.values() if type(v).__name__ == "BoundCheck"), None)


def _function_of(item: pytest.Item) -> tuple[object, str]:
    return item.parent, getattr(item, "originalname", item.name)


def _tried(judged: Callable[[], CheckResult]) -> Answer:
    """An error belongs to one test and ends no other."""
    try:
        return judged()
    except Exception as error:
        return error


def _circumstances() -> Hashable:
    """Return what ranks get besides the check."""
    variables = {name: value for name, value in env.encoded().items() if name != b"PYTEST_CURRENT_TEST"}
    return frozenset(variables.items()), Path.cwd(), tuple(sys.path)
