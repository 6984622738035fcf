"""Runs one marked item on its world, with one setup-call-teardown triple reported for all ranks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator
from typing import Any

import pytest

from fsdp_testing.base.printable import printable
from fsdp_testing.errors import HarnessError
from fsdp_testing.plugin import pytest_compat
from fsdp_testing.plugin.hygiene_report import HygieneReport, report_left_behind, report_teardown_failure
from fsdp_testing.plugin.leases import IN_RANK, Leases
from fsdp_testing.plugin.longrepr import build, text_element
from fsdp_testing.plugin.marker import WorldRequest
from fsdp_testing.plugin.merge import merge
from fsdp_testing.plugin.other_plugins import attempts, deadline_of, wait_before_next
from fsdp_testing.plugin.rank_debugger import debugged_rank
from fsdp_testing.plugin.records import Debugging, ItemTask, Phase, RankResult
from fsdp_testing.plugin.selection import collected_id, location_of, shared_length
from fsdp_testing.plugin.worlds import failed_if_lost
from fsdp_testing.ranks.pool import WorldOutcome
from fsdp_testing.ranks.pool.outcome import Fate

_REQUEST = pytest.StashKey[WorldRequest]()


class Protocol:
    """Runs items on ranks in place of pytest's own protocol."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.leases = Leases(config)
        self._hygiene = HygieneReport(config)
        self._debugged = debugged_rank(config)
        self._unavailable: dict[tuple[str, int], str | None] = {}
        self._plain_chain: list[Any] = []

    def take(self, item: pytest.Item, request: WorldRequest) -> None:
        item.stash[_REQUEST] = request

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        request = item.stash.get(_REQUEST, None)
        if request is None:
            chain = item.listchain()
            # pytest ends the rest after the item itself.
            self._plain_chain = chain[: shared_length(chain, nextitem.listchain())] if nextitem is not None else []
            return None
        if item.config.getoption("setuponly", False):
            _show_plan(item, request)
            return True
        last = attempts(item) - 1
        for attempt in range(last + 1):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            reports = self._reports(item, request, nextitem)
            again = attempt < last and any(report.failed for report in reports)
            for report in reports:
                if again and report.failed:
                    # The outcome that pytest-rerunfailures shows and counts. The world of a failed test is not lent again.
                    report.outcome = "rerun"  # type: ignore[assignment]  # one that pytest itself does not know
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            if not again:
                break
            wait_before_next(item)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse to run a marked item in this process, where it could pass without any rank."""
        if item.stash.get(_REQUEST, None) is not None:
            pytest.fail(
                f"{item.nodeid}: expected this plugin to run the test on ranks, got another plugin that runs it in the "
                "controlling process. Disable that plugin (-p no:NAME), or its hook pytest_runtest_protocol.",
                pytrace=False,
            )

    def _reports(
        self, item: pytest.Item, request: WorldRequest, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        began, clock = time.time(), time.perf_counter()
        properties: tuple[tuple[str, Any], ...] = ()
        all_reported = True
        reason = self._reason_not_to_run(request)
        if reason is not None:
            merged = self._not_run(item, request, reason)
        else:
            try:
                outcome = self._execute(item, request, nextitem)
            except (HarnessError, pytest.fail.Exception) as error:
                # Notes say where the ranks were when another plugin's time limit ended the test.
                merged = _failed_setup(item, "\n".join([str(error), *getattr(error, "__notes__", ())]))
            except Exception:
                # An error of this harness fails this one test, with everything known about it; the session goes on.
                text = "the harness failed, so the verdict is unknown\n" + traceback.format_exc()
                merged = _failed_setup(item, text)
            else:
                merged = merge(outcome, location_of(item))
                all_reported = all(rank.fate is Fate.RETURNED for rank in outcome.ranks)
                self._hygiene.add(item, outcome, merged)
                properties = _properties(outcome)
        self._tear_down_here(item, nextitem, merged)
        # Lending a world, sending and merging belong to setup, so that durations add up to the time spent. Without a report of
        # each rank, the failed phase took the time.
        longest = next((part for part in merged if part.outcome == "failed" and not all_reported), merged[0])
        longest.duration += max(0.0, time.perf_counter() - clock - sum(report.duration for report in merged))
        return [self._report(item, part, began, properties) for part in merged]

    def _execute(self, item: pytest.Item, request: WorldRequest, nextitem: pytest.Item | None) -> WorldOutcome:
        world = self.leases.lend(request)
        try:
            chain = item.listchain()
            keep = shared_length(chain, nextitem.listchain()) if nextitem is not None and world.reusable else 0
            debugging = self._debugging(request)
            task = ItemTask(collected_id(item), str(item.path), keep, not world.reusable, debugging, item.location)
            spec, directory = self.leases.introduction(world)
            outcome = world.execute(
                f"{IN_RANK}:run_item",
                (spec, directory, task),
                timeout=None if debugging is not None else deadline_of(item, request.timeout),
                name=item.nodeid,
                lasting=None,
            )
            results = [value for value in outcome.values if isinstance(value, RankResult)]
            if any(result.dirt for result in results) or len({result.groups for result in results}) > 1:
                world.distrust()
            self.leases.note(world, chain, outcome)
            return outcome
        finally:
            self.leases.give_back(world)

    def _debugging(self, request: WorldRequest) -> Debugging | None:
        if self._debugged is None or self._debugged[0] >= request.size or request.backend == "fake":
            return None
        rank, terminal = self._debugged
        return Debugging(rank, terminal, str(pytest_compat.new_directory(self.config, "debug-") / "done"))

    def _reason_not_to_run(self, request: WorldRequest) -> str | None:
        key = request.backend, request.size
        if key not in self._unavailable:
            from fsdp_testing.base.backends import backend_named

            try:
                self._unavailable[key] = backend_named(request.backend).unavailable(request.size)
            except HarnessError as error:
                self._unavailable[key] = str(error)
        return self._unavailable[key]

    def _not_run(self, item: pytest.Item, request: WorldRequest, reason: str) -> list[Phase]:
        text = f"backend {request.backend} cannot run here: {reason}"
        if self.config.option.require_backend:
            return _failed_setup(item, f"{text} (--require-backend)")
        path, line = location_of(item)
        skipped = Phase("setup", "skipped", 0.0, (path, line, f"Skipped: {text}"))
        return [skipped, Phase("teardown", "passed", 0.0)]

    def _tear_down_here(self, item: pytest.Item, nextitem: pytest.Item | None, merged: list[Phase]) -> None:
        """End fixtures that earlier ordinary tests keep alive in this process for later ones."""
        wanted = nextitem.listchain() if nextitem is not None else []
        shared = shared_length(self._plain_chain, wanted)
        if shared == len(self._plain_chain):
            return
        # Fixtures that the next item shares stay set up; a later item ends them.
        self._plain_chain = self._plain_chain[:shared]
        try:
            pytest_compat.end_fixtures(item, nextitem)
        except Exception as error:
            text = f"teardown in the controlling process: {type(error).__name__}: {error}"
            merged[-1].fail(build([text_element([text])], text, None, location_of(item)))

    def _report(
        self, item: pytest.Item, part: Phase, began: float, properties: tuple[tuple[str, Any], ...]
    ) -> pytest.TestReport:
        facts: dict[str, Any] = {
            "nodeid": item.nodeid,
            "location": item.location,
            "keywords": dict.fromkeys(item.keywords, 1),
            "outcome": part.outcome,
            "longrepr": _shown(part.longrepr),
            "when": part.when,
            "sections": _shown(part.sections),
            "duration": part.duration,
            "start": began,
            "stop": began + part.duration,
            "user_properties": [*item.user_properties, *properties],
        }
        if part.wasxfail is not None:
            facts["wasxfail"] = _shown(part.wasxfail)
        data = {"$report_type": "TestReport", **facts}
        if part.subtest is not None:
            data = {"_report_type": "SubTestReport", "_subtest.context": _shown(part.subtest), **facts}
        elif not isinstance(part.longrepr, dict):
            return pytest.TestReport(**facts)
        made: pytest.TestReport = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
        return made

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
        """Fail a test if its `worlds` lost a rank, even if it is marked `xfail`."""
        report = yield
        return failed_if_lost(report, call.excinfo.value) if call.excinfo is not None else report

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Say where the ranks were when Ctrl-C came: once, whether or not this release of pytest shows notes itself."""
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        for note in getattr(excinfo.value, "__notes__", ()) if terminal is not None else ():
            terminal.ensure_newline()
            terminal.write_line(printable(note))
        excinfo.value.__notes__ = []

    def pytest_unconfigure(self) -> None:
        """Leave no rank behind, however the session ended."""
        self.leases.close()


class Sweep:
    """After every item: end fixtures in the ranks of worlds that the next item does not use."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._last: pytest.Item | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        """End them after an item of either kind."""
        self._last = item
        result = yield
        stopping = item.session.shouldstop or item.session.shouldfail
        self._leases.leave_what_is_not_shared(None if stopping else nextitem)
        problems = self._leases.take_problems()
        if problems:
            report_teardown_failure(item, "teardown of fixtures in ranks failed: " + "; ".join(problems))
        left = self._leases.take_left()
        if left:
            report_left_behind(item, left)
        return result

    def end(self) -> None:
        """End the ranks; errors in this are reported on the last test, since they belong to no other."""
        self._leases.close()
        problems = self._leases.take_problems()
        if problems and self._last is not None:
            text = "\n".join(f"the end of the session in {problem}" for problem in problems)
            report_teardown_failure(self._last, text)


def _shown(value: Any) -> Any:
    """Return plain data with escapes for everything that could steer the terminal; colours stay, as in any test's output."""
    if isinstance(value, str):
        return printable(value, colours=True)
    if isinstance(value, dict):
        return {key: _shown(entry) for key, entry in value.items()}
    return type(value)(map(_shown, value)) if type(value) in (list, tuple) else value


def _show_plan(item: pytest.Item, request: WorldRequest) -> None:
    """Show what would run (`--setup-plan`, `--setup-only`): the terminal is the controller's, and no rank is started."""
    fixtures = ", ".join(sorted(getattr(item, "fixturenames", ())))
    writer = item.config.get_terminal_writer()
    writer.line()
    writer.write(f"        {item.nodeid} (not run; on {request.size} ranks, fixtures there: {fixtures or 'none'})")
    writer.flush()


def _failed_setup(item: pytest.Item, text: str) -> list[Phase]:
    lines = text.splitlines() or ["failed without a message"]
    failed = Phase("setup", "failed", 0.0, build([text_element(lines)], lines[0], None, location_of(item)))
    return [failed, Phase("teardown", "passed", 0.0)]


def _properties(outcome: WorldOutcome) -> tuple[tuple[str, Any], ...]:
    """Return the values that ranks recorded, each once; a name gets the rank if ranks recorded different values."""
    by_value: dict[tuple[str, str], tuple[tuple[str, Any], list[int]]] = {}
    reporting = [rank for rank in outcome.ranks if isinstance(rank.value, RankResult)]
    for rank in reporting:
        for name, value in rank.value.user_properties:
            by_value.setdefault((name, repr(value)), ((name, value), []))[1].append(rank.rank)
    return tuple(
        (name if len(ranks) == len(reporting) else f"{name}[rank {rank}]", value)
        for (name, value), ranks in by_value.values()
        for rank in (ranks[:1] if len(ranks) == len(reporting) else ranks)
    )
