"""Messages between the controlling pytest and the pytest inside a rank: plain data, no pytest objects.

Messages of every test are named tuples or define their own pickling: see `ranks/pool/jobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_testing.ranks.pool.outcome import Dirt


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a rank needs to start the same pytest session as the controller's.

    Attributes:
        root: Root directory.
        inifile: Configuration file, or None.
        directory: The directory in which pytest was invoked.
        paths: Collection arguments: they decide which conftest files are loaded first.
        options: Options by destination, if their values are plain data; options that would make a rank write reports or
            read the terminal are neutralised.
        plugins: (name, module) of the plugins to register.
        blocked: Names of plugins that must not be loaded.
        markers: Registered markers, including those of plugins that ranks do not load.
        empty: An empty directory, for parsing before anything of the user's is loaded.
    """

    root: str
    inifile: str | None
    directory: str
    paths: tuple[str, ...]
    options: dict[str, Any]
    plugins: tuple[tuple[str, str], ...]
    blocked: tuple[str, ...]
    markers: tuple[str, ...]
    empty: str


@dataclass(frozen=True, slots=True)
class Debugging:
    """The rank that gets the terminal, the terminal's path, and the file that appears when the rank is done."""

    rank: int
    terminal: str
    done: str


class ItemTask(NamedTuple):
    """One test item to run in a rank.

    Attributes:
        nodeid: The item's id as collected.
        path: File that defines it.
        keep: How many of the item's leading collectors the next item of the session shares: their fixtures live on.
        last: Whether the session ends with this item (fresh processes).
        debugging: Set under `--rank-pdb`.
        location: The item's place as pytest reports it; None: the rank finds it.
    """

    nodeid: str
    path: str
    keep: int
    last: bool = False
    debugging: Debugging | None = None
    location: tuple[str, int | None, str] | None = None


STRICT_XPASS = "[XPASS(strict)] "
"""Beginning of pytest's message for a test that passes despite a strict xfail mark."""


@dataclass(slots=True)
class Phase:
    """One report of setup, call, teardown, or a subtest of the call; of one rank, or merged from all ranks.

    `longrepr` is the serialised form that `pytest_report_to_serializable` makes; `subtest` what pytest calls the context of a
    subtest: its message and arguments.
    """

    when: str
    outcome: str
    duration: float
    longrepr: Any = None
    sections: list[tuple[str, str]] = field(default_factory=list)
    wasxfail: str | None = None
    subtest: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[type[Phase], tuple[Any, ...]]:
        """Pickle without the fields that are nearly always empty."""
        facts = self.when, self.outcome, self.duration, self.longrepr, self.sections, self.wasxfail, self.subtest
        return Phase, facts[:3] if facts[3:] == (None, [], None, None) else facts

    def fail(self, longrepr: dict[str, Any]) -> None:
        self.outcome, self.longrepr = "failed", longrepr


@dataclass(frozen=True, slots=True)
class WarningRecord:
    """A warning that pytest recorded in a rank."""

    module: str
    category: str
    message: str
    filename: str
    lineno: int
    when: str

    @classmethod
    def of(cls, warning: Any, when: str = "runtest") -> WarningRecord:
        """Return the record of a `warnings.WarningMessage`."""
        category, file = warning.category, str(warning.filename)
        return cls(category.__module__, category.__qualname__, str(warning.message), file, int(warning.lineno), when)


class RankResult(NamedTuple):
    """The result of an item from one rank's pytest.

    Attributes:
        phases: Its reports in order.
        user_properties: Properties from `record_property`.
        warnings: Recorded during the item.
        dirt: What the item, or a fixture that ended with it, leaked.
        kept: How many leading collectors still have fixtures set up.
        groups: How many process groups this rank has ever made; ranks must agree on it.
        stop: Why the test asked to stop the session; empty when it did not.
        problem: Why the item could not be run at all (collection failed in the rank); empty normally.
        fail: Why the test asked to end the session as failed; empty when it did not.
    """

    phases: tuple[Phase, ...] = ()
    user_properties: tuple[tuple[str, Any], ...] = ()
    warnings: tuple[WarningRecord, ...] = ()
    dirt: tuple[Dirt, ...] = ()
    kept: int = 0
    groups: int = 0
    stop: str = ""
    problem: str = ""
    fail: str = ""

    @property
    def failed(self) -> bool:
        """True when the item did not run or a report is a failure."""
        return bool(self.problem) or any(phase.outcome == "failed" for phase in self.phases)
