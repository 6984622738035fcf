"""Runs a pytest item in a rank: it keeps a real pytest session, collects the item's file once, and runs the protocol.

Called by name through the pool, which knows no pytest. The session starts with the first item (some milliseconds) and
lives as long as the rank, so that fixtures of modules and of the session live in the rank between tests.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.base import env
from fsdp_testing.errors import HarnessError, PoolBroken
from fsdp_testing.plugin import pytest_compat, rank_debugger, rank_side, rank_template
from fsdp_testing.plugin.rank_side import RankPlugin, RankTemporaryPaths, group_count
from fsdp_testing.plugin.records import ItemTask, RankResult, WarningRecord
from fsdp_testing.plugin.selection import shared_length
from fsdp_testing.ranks.faults.fault import end_all, never_reached
from fsdp_testing.ranks.pool import hygiene_leftovers
from fsdp_testing.ranks.pool.channel import dumps, loads
from fsdp_testing.ranks.pool.hygiene import take_snapshot
from fsdp_testing.ranks.pool.jobs import Failed
from fsdp_testing.ranks.pool.outcome import Dirt
from fsdp_testing.ranks.pool.targets import Target, resolve
from fsdp_testing.ranks.pool.world import current_world

_POLL_SECONDS = 0.05


class _Kept(pytest.Item):
    """Stands for the next item of the session; a rank needs only the nodes that it shares with the current item."""

    def runtest(self) -> None:
        raise NotImplementedError("this item only says which fixtures live on")


class RankSession:
    """The pytest session of this rank."""

    def __init__(self, spec: bytes, directory: str) -> None:
        rank = current_world().rank
        base = Path(directory)
        own = base / f"tmp{rank}"
        own.mkdir(parents=True, exist_ok=True)  # on another host than the controller's, the world's directory too
        env.update({"TMPDIR": str(own)})
        hygiene_leftovers.TEMPORARY.use(own)
        started = rank_template.take(spec)
        self.config = started.config
        self.session = started.session
        self.filters = started.filters
        with self.filters():
            started.load_users_code()
        pytest_compat.remember_conftests(self.session)
        self.plugin = RankPlugin(self.config, RankTemporaryPaths(base))
        self.config.pluginmanager.register(rank_side, "fsdp_testing.rank_fixtures")
        self.config.pluginmanager.register(self.plugin, rank_side.NAME)
        self._collected: dict[str, str] = {}
        self._kept: dict[Any, _Kept] = {}
        self._last: pytest.Item | None = None
        self._chain: list[Any] = []

    def item(self, task: ItemTask) -> tuple[pytest.Item | None, str]:
        """Return the item, collecting its file if needed; or why there is none."""
        if task.nodeid not in self.plugin.items and task.path not in self._collected:
            self._collected[task.path] = self._collect(task.path)
        found = self.plugin.items.get(task.nodeid)
        if found is not None:
            return found, ""
        problem = self._collected.get(task.path, "")
        if problem:
            return None, f"the test's file could not be collected in this rank:\n{problem}"
        return None, (
            f"in this rank {Path(task.path).name} holds no test {task.nodeid}. "
            "Test ids must be the same in every process: parametrize with a list, not a set, and with names that do "
            "not hold addresses, random numbers or times"
        )

    def _collect(self, path: str) -> str:
        self.config.args[:] = [path]
        # Without Config's own wrapper, which would judge options of plugins that only the controller has.
        hook = self.config.pluginmanager.subset_hook_caller("pytest_collection", remove_plugins=[self.config])
        try:
            hook(session=self.session)
        except Exception as error:
            return f"{type(error).__name__}: {error}\n{self.plugin.take_collection_problem()}".strip()
        return self.plugin.take_collection_problem()

    def run(self, item: pytest.Item, task: ItemTask) -> str:
        """Run the item's setup, call and teardown; returns what went wrong with fixtures of an earlier test."""
        chain = item.listchain()
        shared = shared_length(chain, self._chain)
        # An earlier test may have kept fixtures for a next test that did not come next (a rerun, another order).
        problem = self.tear_down(shared) if shared < len(self._chain) else ""
        self.plugin.begin(item)
        nextitem = self._stand_in(chain[: min(task.keep, len(chain) - 1)])
        self._last, self._chain = item, chain[:-1]
        with pytest_compat.own_notes(item, task.location):
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return f"fixtures of an earlier test failed as they ended:\n{problem}" if problem else ""

    def _stand_in(self, nodes: Sequence[Any]) -> _Kept | None:
        if not nodes:
            return None
        parent = nodes[-1]
        if parent not in self._kept:
            self._kept[parent] = _Kept.from_parent(parent, name="(the next test)")
        return self._kept[parent]

    def tear_down(self, keep: int) -> str:
        """End fixtures of all but the first `keep` nodes of the last item's chain; returns what went wrong."""
        if self._last is None:
            return ""
        nextitem = self._stand_in(self._chain[:keep])
        self._chain = self._chain[:keep]
        try:
            with self.filters():
                pytest_compat.end_fixtures(self._last, nextitem)
        except Exception as error:
            info = pytest.ExceptionInfo.from_exception(error)
            info.traceback = info.traceback.filter(lambda entry: not _OF_PYTEST & {*Path(entry.path).parts[-2:-1]})
            size, last = current_world().size, self._last.nodeid
            return f"{info.exconly()} (fixtures of {size} ranks, used last by {last})\n{info.getrepr(style='short')}"
        return ""

    def kept(self) -> int:
        """Return how many nodes of the last item's chain still have fixtures set up."""
        return self.plugin.deepest_guarded(self._chain)

    def finish(self) -> str:
        """End the session: remaining fixtures, then `pytest_sessionfinish` and `pytest_unconfigure`."""
        problem = self.tear_down(0)
        with self.filters():
            try:
                self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=0)
            except Exception as error:
                problem = "\n".join(filter(None, [problem, f"pytest_sessionfinish: {type(error).__name__}: {error}"]))
            finally:
                pytest_compat.unconfigure(self.config)
        return problem


_OF_PYTEST = {"_pytest", "pluggy", Path(__file__).parent.name}
_session: RankSession | None = None


def _started(spec: bytes | None, directory: str) -> RankSession:
    """Return the session of this process, started with the first job of a world, which brings `spec`."""
    global _session
    if _session is None:
        if spec is None:
            raise PoolBroken("in_rank: expected the session's description with the first item, got none.")
        _session = RankSession(spec, directory)
    return _session


def run_item(spec: bytes | None, directory: str, task: ItemTask) -> RankResult | Failed:
    """Run one item; the entry point of the controller.

    Args:
        spec: Serialised `SessionSpec` with a world's first item, None afterwards.
        directory: Temporary directory of the world.
        task: The item and how it runs.

    Returns:
        This rank's result; a failure is marked as failed, so that ranks that wait for this one are stopped soon.
    """
    session = _started(spec, directory)
    item, problem = session.item(task)
    if item is None:
        session.plugin.take_reports()
        return Failed(RankResult(problem=problem, groups=group_count()))
    with rank_debugger.attached(session.config, task.debugging):
        problem = session.run(item, task)
    stop, fail = session.session.shouldstop, session.session.shouldfail
    finish = session.finish() if task.last else ""
    phases, warnings, dirt = session.plugin.take_reports()
    result = RankResult(
        phases,
        session.plugin.user_properties(),
        warnings,
        dirt,
        session.kept(),
        group_count(),
        str(stop or ""),
        "\n".join(filter(None, [problem, f"the session's end failed in this rank:\n{finish}" if finish else ""])),
        str(fail or ""),
    )
    if task.debugging is not None:
        # Under `--rank-pdb`, a finished rank waits for the debugged one.
        done = Path(task.debugging.done)
        if current_world().rank == task.debugging.rank:
            done.touch()
        while not done.exists():
            time.sleep(_POLL_SECONDS)
    return Failed(result) if result.failed else result


def tear_down(keep: int) -> RankResult:
    """End fixtures that the next item does not share; called when another world runs that item."""
    if _session is None:
        return RankResult()
    problem = _session.tear_down(keep)
    _, warnings, dirt = _session.plugin.take_reports()
    return RankResult((), (), warnings, dirt, _session.kept(), group_count(), "", problem)


def finish() -> str:
    """End the session; called before the rank leaves."""
    global _session
    session, _session = _session, None
    return "" if session is None else session.finish()


def call_function(
    spec: bytes | None, directory: str, test_file: str, target: Target, arguments: bytes
) -> tuple[bytes, tuple[Dirt, ...], tuple[WarningRecord, ...]]:
    """Call a function with its module imported as pytest imports it; serves the fixture `worlds`.

    Args:
        spec: As in `run_item`.
        directory: As in `run_item`.
        test_file: File of the module when it is one that pytest collects, else empty.
        target: The function.
        arguments: Serialised args and kwargs: read once the module that defines their classes is imported.

    Returns:
        The serialised result (read in the test, where its classes are known), what the call leaked, and its warnings.
    """
    session = _started(spec, directory)
    if test_file and target.module not in sys.modules:
        session.item(ItemTask("", test_file, 0))
    with session.filters(), warnings.catch_warnings(record=True) as recorded:
        function = resolve(target)
        args, kwargs = loads(arguments)
        snapshot = take_snapshot()
        try:
            payload = dumps(function(*args, **kwargs))
            unreached = end_all()
        finally:
            end_all()  # before the comparison: what a fault replaced is no leak of the call
            dirt = snapshot.restore()
    if unreached:
        raise HarnessError(never_reached(unreached))
    return payload, dirt, tuple(map(WarningRecord.of, recorded))
