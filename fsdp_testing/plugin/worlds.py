"""The fixture `worlds`, with which a test of the controlling process uses ranks, as Hypothesis tests do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_testing.base.backends import registered_backends
from fsdp_testing.errors import InvalidArgument, WorldFailed
from fsdp_testing.plugin.hygiene_report import WorldHygieneWarning, category_of, each_once
from fsdp_testing.plugin.leases import IN_RANK, Leases
from fsdp_testing.plugin.marker import WorldRequest, read_marker
from fsdp_testing.plugin.records import WarningRecord
from fsdp_testing.plugin.selection import defaults_of
from fsdp_testing.ranks.pool import WorldOutcome
from fsdp_testing.ranks.pool.channel import dumps, loads
from fsdp_testing.ranks.pool.outcome import Fate, left_behind
from fsdp_testing.ranks.pool.targets import target_of


class RanksFailed(WorldFailed, AssertionError):
    """A function run through `worlds` did not return on every rank; the message is the account of every rank."""


class Worlds:
    """The fixture `worlds`: `worlds(size=2, backend="gloo").run(function, *args)` gives one result per rank.

    It lives as long as the session, so that Hypothesis may share it among examples. Reports that belong to one test, such as
    leaks of its functions, go to the test that `running` names.
    """

    def __init__(self, session: pytest.Session, leases: Leases, running: Callable[[], pytest.Item]) -> None:
        self.session = session
        self.leases = leases
        self.running = running

    def __call__(self, size: int = 2, *args: Any, **kwargs: Any) -> BoundWorld:
        """Return a world; the arguments are the marker's.

        Raises:
            InvalidArgument: An argument is wrong; one call takes one size.
        """
        config, where = self.session.config, "fixture worlds"
        defaults = defaults_of(config)
        asked = read_marker((size, *args), kwargs, where=where, defaults=defaults, backends=registered_backends())
        if len(asked.sizes) != 1:
            raise InvalidArgument(f"{where}: expected one size, got {list(asked.sizes)}. Call worlds once per size.")
        return BoundWorld(self, asked.at(asked.sizes[0]))


class BoundWorld:
    """A world of one size and backend, for any number of runs."""

    def __init__(self, worlds: Worlds, asked: WorldRequest) -> None:
        self._worlds = worlds
        self._asked = asked

    def run(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank.

        Args:
            function: At module level, of the test's own module, a conftest or a package; or its name as text.
            args: Sent to every rank; tensors arrive on the CPU.
            kwargs: Likewise.

        Returns:
            One result per rank.

        Raises:
            RanksFailed: A rank raised, died, hung or disagreed.
            Skipped: Every rank called `pytest.skip`; the test skips.
            Warning: One of the function's warnings, which are given again here, where the test's filters make it an error.
            UnsendableFunction: The function has no name that a rank could import.
        """
        __tracebackhide__ = True
        target = target_of(function)
        collected = {str(item.path) for item in self._worlds.session.items}
        test_file = target.path if target.path in collected else ""
        arguments = dumps((args, kwargs))
        world = self._worlds.leases.lend(self._asked)
        try:
            spec, directory = self._worlds.leases.introduction(world)
            outcome = world.execute(
                f"{IN_RANK}:call_function",
                (spec, directory, test_file, target, arguments),
                timeout=self._asked.timeout,
                name=str(target),
                lasting=None,
            )
            if outcome.ok and any(dirt for _, dirt, _ in outcome.values):
                world.distrust()
        finally:
            self._worlds.leases.give_back(world)
        if not outcome.ok:
            if skipped := _reason_to_skip(outcome):
                pytest.skip(skipped)
            raise RanksFailed(outcome.describe(), outcome)
        self._report_dirt(outcome)
        for record, text in each_once(
            ((rank, warned) for rank, (_, _, warned) in enumerate(outcome.values)), outcome.size
        ):
            _warn_again(record, text)
        return [loads(payload) for payload, *_ in outcome.values]

    def _report_dirt(self, outcome: WorldOutcome) -> None:
        text = "; ".join(left_behind((rank, dirt) for rank, (_, dirt, _) in enumerate(outcome.values)))
        if not text:
            return
        if self._worlds.session.config.option.strict_hygiene:
            raise RanksFailed(f"the function leaked state (--strict-hygiene): {text}", outcome)
        self._worlds.running().warn(WorldHygieneWarning(text))


def _reason_to_skip(outcome: WorldOutcome) -> str:
    """Return why all ranks skip; empty if some do not."""
    errors = [rank.error for rank in outcome.ranks if rank.fate is Fate.RAISED]
    reasons = [error.message or "ranks skip" for error in errors if error is not None and error.type_name == "Skipped"]
    return reasons[0] if len(reasons) == outcome.size else ""


def _warn_again(record: WarningRecord, text: str) -> None:
    """Give a rank's warning in this process, under the filters of the test."""
    __tracebackhide__ = True
    category = category_of(record)
    try:
        warnings.warn_explicit(text, category, record.filename, record.lineno)
    except TypeError:  # its class is not made from a text
        warnings.warn_explicit(text, UserWarning, record.filename, record.lineno)


def was_lost(error: BaseException) -> bool:
    """Return whether an error says that a process died or hung, which no test may expect as its failure."""
    outcome = error.outcome if isinstance(error, WorldFailed) else None
    return isinstance(outcome, WorldOutcome) and any(rank.fate in (Fate.DIED, Fate.HUNG) for rank in outcome.ranks)


def failed_if_lost(report: pytest.TestReport, error: BaseException) -> pytest.TestReport:
    """Return the report of a phase that ended with an error: a failure if a process was lost, even in a marked test."""
    if was_lost(error) and report.outcome != "failed":
        report.outcome = "failed"
        report.longrepr = report.longrepr or str(error)
        vars(report).pop("wasxfail", None)
    return report
