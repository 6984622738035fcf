"""Gives tests on ranks the deadline of pytest-timeout and the reruns of pytest-rerunfailures.

Neither sees such a test: it has no setup, call or teardown in the controlling process. So this module reads their settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

_LIMIT = pytest.StashKey[float]()
# Settings that decide on a rerun by the exception itself, which stays in its rank, or by a count of the whole session.
_FILTERS = ("only_rerun", "rerun_except", "max_suite_reruns")


class TimeLimits:
    """Applies the limits of pytest-timeout to tests on ranks, through its hooks.

    Its own methods end the session (`thread`) or the wait for the ranks (`signal`). The pool ends the ranks, says where each
    of them is, and the session goes on. With `timeout_func_only` pytest-timeout calls no hook, and there is no such limit.
    """

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Note the limit of a marked test and return True."""
        if item.get_closest_marker("world") is None:
            return None
        item.stash[_LIMIT] = float(settings.timeout)
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        """There is no timer of pytest-timeout to cancel for a marked test."""
        return True if item.get_closest_marker("world") is not None else None


def deadline_of(item: pytest.Item, own: float | None) -> float | None:
    """Return the shorter one of the marker's deadline `own` and the limit of pytest-timeout, in seconds; None: neither."""
    return min((limit for limit in (own, item.stash.get(_LIMIT, None)) if limit is not None), default=None)


def attempts(item: pytest.Item) -> int:
    """Return how often pytest-rerunfailures runs a failing test, at least once."""
    plugin: Any = item.config.pluginmanager.get_plugin("rerunfailures")
    if plugin is None or _refusal(item):
        return 1
    return 1 + int(plugin.get_reruns_count(item) or 0)


def wait_before_next(item: pytest.Item) -> None:
    """Wait for the delay of pytest-rerunfailures between two attempts."""
    plugin: Any = item.config.pluginmanager.get_plugin("rerunfailures")
    delay = float(plugin.get_reruns_delay(item) or 0.0)
    if delay > 0:
        time.sleep(delay)


def warn_of_reruns(config: pytest.Config, marked: Sequence[pytest.Item]) -> None:
    """Say once why pytest-rerunfailures cannot rerun failed tests on ranks."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in marked:
        asked = getattr(config.option, "reruns", None) or item.get_closest_marker("flaky") is not None
        refusal = _refusal(item) if asked else ""
        if refusal:
            text = f"pytest-rerunfailures: {item.nodeid} is not run again when it fails on ranks: {refusal}"
            config.issue_config_time_warning(pytest.PytestWarning(text), stacklevel=2)
            return


def _refusal(item: pytest.Item) -> str:
    """Return why no further attempt can be made; empty if it can."""
    plugin: Any = item.config.pluginmanager.get_plugin("rerunfailures")
    if not all(hasattr(plugin, name) for name in ("get_reruns_count", "get_reruns_delay")):
        return "this release does not say how often"
    mark = item.get_closest_marker("flaky")
    given = mark.kwargs if mark is not None else {}
    used = [name for name in _FILTERS if name in given or getattr(item.config.option, name, None)]
    used += ["condition"] if "condition" in given else []
    if used:
        return f"{', '.join(used)} cannot be judged outside of the rank that failed"
    return ""
