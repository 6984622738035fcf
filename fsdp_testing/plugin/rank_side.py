"""The pytest plugin inside a rank: fixtures of the rank, reports kept, state guarded.

Reports and warnings are kept for the controller instead of shown. State is compared and restored around exactly what a
test owns: a snapshot is taken before the first fixture of a node is set up, and compared after the last one of that
node is torn down. So changes by a module's fixture last as long as the module's fixtures.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.base import torch_state
from fsdp_testing.base.backends import backend_named
from fsdp_testing.errors import CollectiveMismatch, HarnessError, InvalidArgument
from fsdp_testing.plugin.records import STRICT_XPASS, Phase, WarningRecord
from fsdp_testing.plugin.selection import SIZE_FIXTURE, collected_id, parametrize_sizes
from fsdp_testing.ranks.faults.fault import end_all, never_reached
from fsdp_testing.ranks.pool.hygiene import ENDS_WITH_PROCESS, Snapshot, take_snapshot
from fsdp_testing.ranks.pool.outcome import Dirt
from fsdp_testing.ranks.pool.world import World, current_world

NAME = "fsdp_testing.rank"
# Between a user's call of a collective and the mismatch that the ledger raises there.
_NOTICING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "fsdp_testing/ranks/ledger/interception.py",
    "fsdp_testing/ranks/ledger/recorder.py",
    "fsdp_testing/ranks/faults/injection.py",
)
_TORCHS_LOG = re.compile(r"\w+ +c10d-NullHandler-default:")
_SET_PER_TEST = frozenset({"warnings filters", "logging"})
_UNEXPECTED = "Unexpected success"  # pytest's report on a test that passed under `unittest.expectedFailure`


def _plain(value: object) -> Any:
    """Return a property as reports show it: plain values, and anything else as its text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class RankPlugin:
    """Listens to the session of one rank."""

    def __init__(self, config: pytest.Config, factory: RankTemporaryPaths) -> None:
        self.config = config
        self.factory = factory
        self.items: dict[str, pytest.Item] = {}
        self._item: tuple[str, int] = ("", 0)
        self._runs = 0
        self._phases: list[Phase] = []
        self._warnings: list[WarningRecord] = []
        self._collection_problems: list[str] = []
        self._user_properties: tuple[tuple[str, Any], ...] = ()
        self._dirt: list[Dirt] = []
        self._guards: dict[pytest.Item | pytest.Collector, Snapshot] = {}
        self._directories: dict[tuple[Any, Path], Any] = {}

    def begin(self, item: pytest.Item) -> None:
        """Note the running item; ranks of a world run the same items in the same order."""
        self._runs += 1
        self._item = (item.name, self._runs)

    def take_reports(self) -> tuple[tuple[Phase, ...], tuple[WarningRecord, ...], tuple[Dirt, ...]]:
        """Return everything since the last call."""
        taken = tuple(self._phases), tuple(self._warnings), tuple(self._dirt)
        self._phases, self._warnings, self._dirt = [], [], []
        return taken

    def take_collection_problem(self) -> str:
        """Return why collecting failed, if it did."""
        problem = "\n".join(self._collection_problems)
        self._collection_problems = []
        return problem

    def user_properties(self) -> tuple[tuple[str, Any], ...]:
        """Return the properties of the item that ran last."""
        return self._user_properties

    def deepest_guarded(self, chain: list[Any]) -> int:
        """Return how many leading nodes of `chain` have fixtures set up, counted to the deepest such node."""
        return max((i + 1 for i, node in enumerate(chain) if node in self._guards), default=0)

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Shorten a mismatch; and a wrong use of the plugin is not what a mark expects to fail, unless it names the error."""
        self._shorten(call)
        report = yield
        misused = call.excinfo is not None and isinstance(call.excinfo.value, HarnessError | InvalidArgument)
        named = any(mark.kwargs.get("raises") is not None for mark in item.iter_markers("xfail"))
        if misused and not named and hasattr(report, "wasxfail"):
            report.outcome = "failed"
            del report.wasxfail
        owners = getattr(item, "obj", None), getattr(item, "cls", None)
        expecting = any(getattr(owner, "__unittest_expecting_failure__", False) for owner in owners)
        if expecting and call.excinfo is not None and str(call.excinfo.value) == _UNEXPECTED:
            report.longrepr = f"{STRICT_XPASS}{_UNEXPECTED}"
        return report

    def _shorten(self, call: pytest.CallInfo[Any]) -> None:
        """End the traceback of a mismatch at the call of the collective: the ledger's frames do not help users."""
        if call.excinfo is None or not isinstance(call.excinfo.value, CollectiveMismatch):
            return
        last = trace = call.excinfo.value.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.endswith(_NOTICING):
                last = trace
            trace = trace.tb_next
        if last is not None:
            last.tb_next = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = report.outcome == "passed" and not report.sections
        longrepr = subtest = None
        report.sections = [(title, text) for title, text in map(_without_torchs_log, report.sections) if text]
        if not plain:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            longrepr, subtest = data["longrepr"], data.get("_subtest.context")
        if report.when == "teardown":
            self._user_properties = tuple((str(name), _plain(value)) for name, value in report.user_properties)
        outcome, wasxfail = report.outcome, getattr(report, "wasxfail", None)
        if isinstance(longrepr, str) and longrepr.startswith(STRICT_XPASS):
            # This rank need not fail: the test fails as its mark says if it fails on any rank.
            outcome, wasxfail = "passed", longrepr.removeprefix(STRICT_XPASS)
        sections = list(report.sections)
        self._phases.append(Phase(report.when, outcome, report.duration, longrepr, sections, wasxfail, subtest))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why something could not be collected."""
        if report.failed:
            self._collection_problems.append(str(report.longrepr))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        """Keep a warning; those of configuration and collection are the controller's own already."""
        del nodeid
        if when == "runtest":
            self._warnings.append(WarningRecord.of(warning_message, when))

    # First in both processes: the order of parameters is the order in the id, and plugins are registered differently.
    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make the same test ids as the controller."""
        parametrize_sizes(metafunc)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remember the item by its id, whatever later hooks deselect."""
        self.items.setdefault(collected_id(item), item)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path, parent: Any) -> Generator[None, Any, Any]:
        """Give a directory the same node each time: fixtures of a package live as long as its node."""
        made = yield
        return None if made is None else self._directories.setdefault((parent, path), made)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        """Guard the node that a fixture belongs to before its first fixture."""
        __tracebackhide__ = True
        own = str(fixturedef.func.__module__).startswith(("_pytest.", "fsdp_testing."))
        if fixturedef.scope != "function" and own:
            # A fixture of pytest or of this plugin changes no state.
            return (yield)
        node = request.node
        if node not in self._guards:
            self._guard(node)
        inside: list[Snapshot] = []
        if fixturedef.scope != "function":
            inside = [guard for other, guard in self._guards.items() if other is not node and node in other.listchain()]
        before = Snapshot() if inside else None
        result = yield
        if before is not None:
            # A longer-lived fixture was requested in the middle of a test: its changes outlast the test.
            after = Snapshot()
            for snapshot in inside:
                snapshot.accept(before, after)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Guard a test that has no fixture of its own."""
        if item not in self._guards:
            self._guard(item)

    def _guard(self, node: Any) -> None:
        # pytest itself sets filters and log handlers around each test, so that no longer-lived fixture can own them.
        ignore = frozenset() if isinstance(node, pytest.Item) else _SET_PER_TEST
        if not backend_named(current_world().backend).makes_group:
            ignore |= ENDS_WITH_PROCESS  # such a world is never kept, and making a group leaves its traces
        self._guards[node] = take_snapshot(zlib.crc32(node.nodeid.encode(errors="surrogateescape")), ignore)
        # Finalizers run last in, first out: this one comes after those of all fixtures of the node.
        node.addfinalizer(lambda: self._check(node))

    def _check(self, node: Any) -> None:
        snapshot = self._guards.pop(node, None)
        if snapshot is None:
            return
        dirt = snapshot.restore()
        if dirt and not isinstance(node, pytest.Item):
            owner = node.nodeid or "the session"
            dirt = tuple(Dirt(d.kind, f"{d.what} (by a fixture of {owner})", d.restored) for d in dirt)
        self._dirt.extend(dirt)

    def item_directory(self) -> Path:
        """Return the temporary directory of the running item, the same one on every rank."""
        name, number = self._item
        path = self.factory.getbasetemp() / f"{re.sub(r'[^A-Za-z0-9]', '_', name)[:30]}-{number}"
        path.mkdir(exist_ok=True)
        return path


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """End what the test injected, before its state is compared; a fault that was not reached is an error of the test."""
    __tracebackhide__ = True
    unreached = end_all()
    yield
    if unreached:
        raise HarnessError(never_reached(unreached))


def _plugin(request: pytest.FixtureRequest) -> RankPlugin:
    found: RankPlugin = request.config.pluginmanager.get_plugin(NAME)  # type: ignore[assignment]  # a plugin has any type
    return found


@pytest.fixture(scope="session")
def world() -> World:
    """This rank's view of its world: rank, size, device, group, mesh, barrier, all_gather_object."""
    return current_world()


@pytest.fixture(scope="session")
def worlds() -> None:
    """Refused: a rank cannot run other ranks."""
    pytest.fail(
        "fixture worlds: expected a test without the `world` marker, got one that runs on ranks itself. "
        "Remove the marker: `worlds(size=2).run(function)` is called from the controlling process.",
        pytrace=False,
    )


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Path:
    """The test's temporary directory, the same one on every rank."""
    return _plugin(request).item_directory()


@pytest.fixture(scope="session")
def tmp_path_factory(request: pytest.FixtureRequest) -> RankTemporaryPaths:
    """Makes directories that every rank of the world finds under the same name."""
    return _plugin(request).factory


@pytest.fixture(name=SIZE_FIXTURE)
def _size(request: pytest.FixtureRequest) -> Any:
    """Carries the size from a marker's list into the test's id."""
    return getattr(request, "param", None)


class RankTemporaryPaths:
    """Like pytest's factory, but numbered by the order of calls: equal on ranks that make equal calls."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._numbers: dict[str, int] = {}

    def getbasetemp(self) -> Path:
        """Directory of the world, shared by its ranks."""
        return self._base

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        """Make `basename` (with the number of this call) in the world's directory; another rank may have made it."""
        name = Path(basename)
        if name.is_absolute() or len(name.parts) != 1 or basename in (".", ".."):
            raise ValueError(f"tmp_path_factory.mktemp: expected a plain name, got {basename!r}.")
        if numbered:
            number = self._numbers.get(basename, 0)
            self._numbers[basename] = number + 1
            name = Path(f"{basename}{number}")
        path = self._base / name
        path.mkdir(exist_ok=True)
        return path


def _without_torchs_log(section: tuple[str, str]) -> tuple[str, str]:
    """Drop torch's log lines about a collective that raised: the exception itself is shown."""
    title, text = section
    if not title.startswith("Captured log"):
        return section
    return title, "\n".join(line for line in text.splitlines() if not _TORCHS_LOG.match(line))


def group_count() -> int:
    """Return how many process groups this rank has ever made."""
    return torch_state.process_group_count()
