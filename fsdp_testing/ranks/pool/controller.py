"""The pool keeps the worlds: makes one on first use, lends it again, replaces it when it cannot be trusted."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.base import env
from fsdp_testing.base.backends import backend_named
from fsdp_testing.errors import BackendUnavailable, HarnessError, InvalidArgument, PoolBroken
from fsdp_testing.ranks.pool import preload
from fsdp_testing.ranks.pool.device_slots import DeviceSlots, Lease
from fsdp_testing.ranks.pool.outcome import WorldOutcome
from fsdp_testing.ranks.pool.server import ForkServer, directory
from fsdp_testing.ranks.pool.world import inside_rank
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld, WorldKey

if TYPE_CHECKING:
    from fsdp_testing.ranks.pool.hosts import Hosts

MOST_PROCESSES = 256
_MOST_IDLE_RANKS = 64
_DESCRIPTORS = 6
# How long to wait until the tests of other workers free their devices.
_DEVICE_SECONDS = 600.0
# The system calls that ranks need. Windows has none of them, macOS some: checked when ranks are made, never at import.
_NEEDED = ((os, "fork"), (os, "register_at_fork"), (os, "memfd_create"), (socket, "SOCK_SEQPACKET"), (select, "poll"))


class Pool:
    """Worlds by size and backend, all forked from one fork server. Thread-safe; one per process is enough.

    Attributes:
        owner: The process that made it.
        coverage: How ranks measure it, if they do.
        run: Name of the pytest-xdist run in which this process is a worker; empty elsewhere.
        hosts: Processes of a launcher that fork ranks too.
        given_up: Why the pool lends no more worlds; empty while it lends.
    """

    def __init__(self, preload_modules: Sequence[str] = ()) -> None:
        self.coverage: dict[str, Any] | None = None
        self.run = ""
        self._lock = threading.RLock()
        self._extra_modules = tuple(preload_modules)
        self._expected: list[str] = []
        self._preparations: tuple[tuple[str, str], ...] = ()
        self._server: ForkServer | None = None
        # Most recently used last.
        self._worlds: list[PooledWorld] = []
        self._unavailable: dict[WorldKey, str] = {}
        self._slots: DeviceSlots | None = None
        self._numbers = itertools.count()
        self.owner = os.getpid()
        self.hosts: Hosts | None = None
        self.given_up = ""

    def add_preload(self, *modules: str) -> None:
        """Import `modules` in the fork server too; only before it has started."""
        self._extra_modules += tuple(name for name in modules if name not in self._extra_modules)

    def expect(self, *modules: str) -> None:
        """Import `modules` before the next rank is forked: the caller knows that all of its ranks will need them."""
        with self._lock:
            new = [name for name in modules if name not in self._expected]
            self._expected += new
            if self._server is not None:
                self._server.expect(new)

    def add_preparation(self, target: str, argument: str) -> None:
        """Call "package.module:function" with a text in the fork server before its first fork; only before it started.

        For objects that every rank would make in the same way, such as a pytest session. It must not compute or start threads; if
        it raises, ranks do without.
        """
        self._preparations = (*(p for p in self._preparations if p[0] != target), (target, argument))

    def start(self) -> None:
        """Begin starting the fork server without waiting for it; nothing happens where ranks cannot be made."""
        if platform_refusal() is None:
            self.server()

    def server(self) -> ForkServer:
        """Return the fork server; start it if it is not running."""
        with self._lock:
            if self._server is not None and not self._server.alive:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = ForkServer(preload.FIRST + self._extra_modules, self._preparations, run=self.run)
                self._server.expect(self._expected)
            return self._server

    @contextlib.contextmanager
    def lend(self, size: int, backend: str = "gloo", isolation: str = "warm") -> Iterator[PooledWorld]:
        """Lend a world of `size` ranks until the block ends; arguments and errors are those of `world`."""
        world = self.world(size, backend, isolation)
        try:
            yield world
        finally:
            world.release()

    def world(self, size: int, backend: str = "gloo", isolation: str = "warm") -> PooledWorld:
        """Lend a world of `size` ranks across calls; give it back with `release`. Within one block `lend` does that.

        Args:
            size: Number of ranks, at least 1.
            backend: A registered backend.
            isolation: "warm" lends a kept world, "fresh" makes one that ends when it is given back.

        Raises:
            InvalidArgument: For a bad size, isolation or backend name.
            BackendUnavailable: The backend was found unable to run a world of this size here.
            PoolBroken: When no rank can be started, on this system or now.
            HarnessError: When called inside a rank.
        """
        _validate(size, backend, isolation)
        if inside_rank():
            raise HarnessError(
                "pool.world: expected the controlling process, got a rank of a world. Worlds cannot be nested: "
                "use the rank's own world (fsdp_testing.current_world), or make groups with torch.distributed.new_group."
            )
        refusal = self.given_up or platform_refusal()
        if refusal:
            raise PoolBroken(f"pool.world: {refusal}")
        key = WorldKey(size, backend)
        with self._lock:
            if key in self._unavailable:
                raise BackendUnavailable(self._unavailable[key])
            world = self._idle(key) if isolation == "warm" else None
            if world is not None:
                self._worlds.remove(world)
                self._worlds.append(world.lend())
                return world
        # Outside the lock: this may wait ten minutes for devices, and threads that need none must not wait with it.
        lease = self._lease_of(key)
        with self._lock:
            # The store of a world without a group would keep an earlier test's keys, and the next group would read them.
            reusable = isolation == "warm" and backend_named(backend).makes_group
            try:
                world = PooledWorld(self, key, reusable=reusable, lease=lease)
            except BaseException as error:
                if lease is not None:
                    lease.release()
                if isinstance(error, OSError):
                    raise PoolBroken(
                        f"pool.world: expected what a world of {size} ranks needs (about {_DESCRIPTORS} "
                        f"descriptors for each), got {type(error).__name__}: {error}. Close what you do not need, raise the "
                        "limits of this process (`ulimit -n`), or use smaller worlds."
                    ) from error
                raise
            world.lend()
            self._worlds.append(world)
        self._limit_idle()
        return world

    def _lease_of(self, key: WorldKey) -> Lease | None:
        """Take devices for a world when pytest-xdist workers run side by side; otherwise worlds may share them."""
        backend = backend_named(key.backend)
        if backend.device_count is None or self.hosts is not None or env.get("PYTEST_XDIST_WORKER") is None:
            return None
        if self._slots is None or self._slots.count != backend.device_count():
            visible = re.sub(r"\W", "_", env.get("CUDA_VISIBLE_DEVICES") or "all")
            name = f"fsdp-testing-devices-{os.getuid()}-{visible}"
            self._slots = DeviceSlots(Path(tempfile.gettempdir()) / name, backend.device_count())
        try:
            return self._slots.take(key.size, 0.0)
        except PoolBroken:
            # End this process's idle worlds first: other processes wait for their devices, as this one waits for theirs.
            for idle in self.worlds():
                if idle.has_devices and not idle.busy:
                    idle.leave()
            return self._slots.take(key.size, _DEVICE_SECONDS)

    def devices_awaited(self) -> bool:
        """Return whether another process waits for devices."""
        return self._slots is not None and self._slots.awaited()

    def _idle(self, key: WorldKey) -> PooledWorld | None:
        for world in list(self._worlds):
            if world.key == key and world.reusable and world.trusted and not world.busy:
                if world.whole:
                    return world
                # A rank ended while it was idle; no call is to blame.
                world.discard()
        return None

    def _limit_idle(self) -> None:
        """End the worlds that were idle longest when idle ranks are too many."""
        with self._lock:
            idle = [world for world in self._worlds if not world.busy]
            surplus = sum(len(world.pids) for world in idle) - _MOST_IDLE_RANKS
            leaving = []
            for world in idle:
                if surplus <= 0:
                    break
                surplus -= len(world.pids)
                # Taken under the lock, so that no thread borrows it; ended outside, since ranks may have something to save.
                world.lend()
                leaving.append(world)
        for world in leaving:
            world.leave()

    def give_up(self, why: str) -> None:
        """End the running calls and lend no more worlds: a host has vanished, or the launcher ends the run."""
        self.given_up = self.given_up or why
        for world in self.worlds():
            if world.busy:
                world.kill_ranks()

    def shared_directory(self, prefix: str, base: str | None = None) -> str:
        """Make a directory that the ranks of every host see; the caller removes it.

        Args:
            prefix: Prefix of its name.
            base: Parent folder, if possible; by default the temporary folder, or the current directory.

        Raises:
            PoolBroken: Some hosts see neither.
        """
        blind: tuple[str, ...] = ()
        for parent in dict.fromkeys((base or tempfile.gettempdir(), tempfile.gettempdir(), directory())):
            made = tempfile.mkdtemp(prefix=prefix, dir=parent)
            blind = self.hosts.blind_to(made) if self.hosts is not None else ()
            if not blind:
                return made
            Path(made).rmdir()
        raise PoolBroken(
            f"pool: expected a directory that all hosts see, got {directory()!r}, unseen by {', '.join(blind)}. Start the "
            "command in a directory on a file system that they share, or set TMPDIR to one."
        )

    def next_number(self) -> int:
        """Return a number that no other world of this pool has."""
        return next(self._numbers)

    def forget(self, world: PooledWorld) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._worlds.remove(world)

    def note(self, key: WorldKey, outcome: WorldOutcome, modules: Iterable[str]) -> None:
        """Note from an outcome which modules ranks had to import, and which backend cannot run."""
        with self._lock:
            reason = unavailable_reason(outcome)
            if reason:
                self._unavailable[key] = reason
            if self._server is not None and outcome.ok:
                self._server.import_ahead(modules)

    def worlds(self) -> tuple[PooledWorld, ...]:
        with self._lock:
            return tuple(self._worlds)

    def close(self) -> None:
        """End every rank and the fork server; the pool starts again on its next use."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            try:
                for world in list(self._worlds):
                    # A thread waits in it, notices, and releases the rest.
                    if world.busy:
                        world.kill_ranks()
                    else:
                        world.leave()
            finally:
                if self._server is not None:
                    self._server.close()
                    self._server = None
                self._unavailable.clear()


def missing_system_calls() -> tuple[str, ...]:
    """Return the names of system calls that ranks need and this system lacks."""
    return tuple(f"{module.__name__}.{name}" for module, name in _NEEDED if not hasattr(module, name))


def platform_refusal() -> str | None:
    """Return why no rank can be made on this system; None if it can."""
    missing = missing_system_calls()
    if not missing:
        return _no_temporary_files()
    return (
        f"expected Linux, where ranks are forked, got {sys.platform} without {', '.join(missing)}. Run tests on "
        f"ranks on Linux (a container or WSL 2 is enough); everything else works here."
    )


def _no_temporary_files() -> str | None:
    """Say where a directory for temporary files was looked for; None if there is one (torch itself needs it)."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return (
            f"expected a writable directory for temporary files, got {error.strerror}. Make room there, or set "
            "TMPDIR to a directory of your own."
        )
    return None


def unavailable_reason(outcome: WorldOutcome) -> str:
    """Why the world's backend cannot run on this machine; empty for any other outcome."""
    for rank in outcome.ranks:
        if rank.error is not None and rank.error.type_name == "BackendUnavailable" and not rank.began:
            return rank.error.message
    return ""


def _validate(size: int, backend: str, isolation: str) -> None:
    from fsdp_testing.base.backends import registered_backends

    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"world: expected a size of at least 1, got {size!r}. Give the number of ranks.")
    if isolation not in ("warm", "fresh"):
        raise InvalidArgument(f"world: expected isolation 'warm' or 'fresh', got {isolation!r}.")
    if backend not in registered_backends():
        known = ", ".join(registered_backends())
        raise InvalidArgument(
            f"world: expected a backend among {known}, got {backend!r}. Check the name or register it."
        )
    if size > MOST_PROCESSES and not backend_named(backend).single_process:
        raise InvalidArgument(
            f"world: expected at most {MOST_PROCESSES} ranks that are processes of this machine, got {size}. "
            "Use backend='fake', which runs any rank of any size in one process."
        )


class _Default:
    """The pool of this process, and the lock that makes it one."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.renew_lock()

    def renew_lock(self) -> None:
        """In a forked child the lock may be held by a thread that the child does not have."""
        self.lock = threading.Lock()


_default = _Default()
if hasattr(os, "register_at_fork"):  # where there is no fork there is no forked child
    os.register_at_fork(after_in_child=_default.renew_lock)


def default_pool() -> Pool:
    """Return the pool of this process, closed when the process ends."""
    with _default.lock:
        if _default.pool is None or _default.pool.owner != os.getpid():
            _default.pool = Pool()
            atexit.register(_default.pool.close)
        return _default.pool
