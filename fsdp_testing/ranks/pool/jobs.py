"""The messages between controller and rank, as data: a bootstrap, jobs, and None to leave; reports.

What is sent for every call is a named tuple: a frozen dataclass takes ten times as long to be pickled and read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_testing.ranks.pool.outcome import Dirt, ErrorRecord
from fsdp_testing.ranks.pool.targets import Target

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a new rank needs to join its world.

    `devices` belong to the world alone, and its ranks use them in turn; if empty, its ranks use all devices.
    Rank 0 serves the world's store at `store_host`; gloo uses `interface` (empty: gloo chooses), and `ranks_here` is the
    number of the world's ranks on this machine.
    """

    rank: int
    size: int
    backend: str
    store_port: int
    environment: dict[str, str]
    sys_path: list[str]
    directory: str
    argv: list[str]
    devices: tuple[int, ...] = ()
    coverage: dict[str, Any] | None = None
    store_host: str = LOOPBACK
    interface: str = "lo"
    ranks_here: int = 0


@dataclass(frozen=True, slots=True)
class StandInRank:
    """A new rank and size for a single-process world (fake backend)."""

    rank: int
    size: int


class Job(NamedTuple):
    """Call `target` with `arguments` (args and kwargs, serialised once for all ranks).

    The state of the process is compared and restored, except the kinds in `lasting`; None: nothing is compared.
    `sys_path`, `environment` (None removes a variable) and `directory` say what changed in the controller since the last
    job, so that a kept rank sees what a new one would.
    """

    number: int
    name: str
    target: Target
    arguments: bytes
    lasting: frozenset[str] | None = frozenset()
    sys_path: list[str] | None = None
    environment: dict[str, str | None] | None = None
    directory: str | None = None
    place: StandInRank | None = None


class Report(NamedTuple):
    """The end of a job on one rank; number 0 comes from a new rank: it has joined its world, or `error` says why not.

    `payload` is the serialised result, made in the rank so that its errors stay there. `worn` ranks have too many threads left.
    """

    number: int = 0
    payload: bytes = b""
    failed: bool = False
    error: ErrorRecord | None = None
    dirt: tuple[Dirt, ...] = ()
    seconds: float = 0.0
    finished_at: float = 0.0
    new_modules: tuple[str, ...] = ()
    worn: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended: one of exit code and signal name; `moment` is on the system's monotonic clock."""

    code: int | None
    signal_name: str | None
    moment: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A target returns this to mark its result as a failure; the other ranks then get only the grace period."""

    value: Any = field(default=None)
