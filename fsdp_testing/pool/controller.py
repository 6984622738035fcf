"""Who keeps the worlds? The pool: makes one on first use, lends it again, replaces it when it cannot be trusted."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import InvalidArgument, PoolBroken
from fsdp_testing.ledger import memory
from fsdp_testing.pool import preload
from fsdp_testing.pool.channel import dumps
from fsdp_testing.pool.jobs import Bootstrap, Close, Job, Place
from fsdp_testing.pool.outcome import Fate, WorldOutcome
from fsdp_testing.pool.processes import ForkServer, RankProcess, environment_for_ranks, listening_socket
from fsdp_testing.pool.supervision import Supervision
from fsdp_testing.pool.targets import Target, target_of

_LEAVE_SECONDS = 5.0
_SINGLE_PROCESS = ("fake",)


@dataclass(frozen=True, slots=True)
class WorldKey:
    """What makes two worlds interchangeable."""

    size: int
    backend: str


class PooledWorld:
    """A world on loan: `size` ranks that run one call at a time, all of them the same call."""

    def __init__(self, pool: Pool, key: WorldKey, *, kept: bool) -> None:
        self.key = key
        self.kept = kept
        self.trusted = True
        self.busy = False
        self.before_leaving: list[Callable[[PooledWorld], None]] = []
        self._pool = pool
        self._single = key.backend in _SINGLE_PROCESS
        self._jobs = 0
        self._sys_path: list[str] = []
        self._place: Place | None = None
        processes = 1 if self._single else key.size
        ledger_fd = memory.create(processes)
        try:
            self._ledger = memory.LedgerMemory(ledger_fd, processes)
            self._processes = self._start(processes, ledger_fd)
        finally:
            os.close(ledger_fd)

    def _start(self, count: int, ledger_fd: int) -> list[RankProcess]:
        settings = environment_for_ranks()
        self._sys_path = list(settings["sys_path"])
        processes: list[RankProcess] = []
        with contextlib.ExitStack() as undo, listening_socket() as listener:
            port = listener.getsockname()[1]
            for rank in range(count):
                listen = listener.fileno() if rank == 0 and not self._single else None
                process = RankProcess(self._pool.server(), rank, ledger_fd, listen)
                processes.append(process)
                undo.callback(process.close)
                undo.callback(process.kill)
                process.channel.send(
                    Bootstrap(
                        rank=rank,
                        size=self.key.size,
                        backend=self.key.backend,
                        device_index=rank,
                        store_port=port,
                        coverage=self._pool.coverage,
                        **settings,
                    )
                )
            undo.pop_all()
        return processes

    def at(self, rank: int) -> PooledWorld:
        """In a single-process world: stand for `rank` from the next job on."""
        self._place = Place(rank, self.key.size)
        return self

    def execute(
        self,
        target: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = 60.0,
        name: str = "",
        hygiene: bool = True,
    ) -> WorldOutcome:
        """Call `target(*args, **kwargs)` on every rank and wait for the end of it, whatever that is.

        Args:
            target: an importable function, or "package.module:function".
            args: sent once, the same to every rank.
            kwargs: likewise.
            timeout: seconds until a rank counts as hung; None waits for ever.
            name: shown in messages.
            hygiene: put process state back after the call and report what was dirty.

        Returns:
            The account of every rank. When it is not `ok`, or something was left dirty, the world is not lent again.

        Raises:
            UnsendableFunction, InvalidArgument: before anything is sent.
            PoolBroken: when the world has been closed.
        """
        if not self._processes:
            raise PoolBroken("world.execute: expected an open world, got one that is closed. Ask the pool for another.")
        reference = target if isinstance(target, Target) else target_of(target)
        job = self._job(reference, name or str(reference), _serialise(args, kwargs or {}, reference), hygiene)
        supervision = Supervision(
            self._processes, self._ledger, job, self.key.size, self.key.backend, timeout, single_process=self._single
        )
        finished = False
        try:
            outcome = supervision.run()
            finished = True
        finally:
            # Ctrl-C, or an error of ours, leaves ranks in an unknown place.
            if not finished:
                self.discard()
        self._pool.note_modules(supervision.new_modules)
        if not outcome.ok or any(rank.dirt for rank in outcome.ranks):
            self.trusted = False
        if any(rank.fate not in (Fate.RETURNED, Fate.RAISED) for rank in outcome.ranks):
            self.discard()
        return outcome

    def _job(self, target: Target, name: str, arguments: bytes, hygiene: bool) -> Job:
        import sys

        self._jobs += 1
        changed = None
        if sys.path != self._sys_path:
            changed = self._sys_path = list(sys.path)
        return Job(self._jobs, name, target, arguments, hygiene, changed, self._place)

    def borrow(self) -> None:
        """Take this very world again, between two tests that it may serve."""
        self.busy = True

    def distrust(self) -> None:
        """Have this world replaced once it is given back: a user of it knows that it is no longer clean."""
        self.trusted = False

    def release(self) -> None:
        """Give the world back; ends it when it is not to be lent again."""
        self.busy = False
        if not self.trusted or not self.kept:
            self.leave()

    def leave(self) -> None:
        """Let the ranks end by themselves (they save coverage), then make sure of it."""
        for farewell in self.before_leaving:
            farewell(self)
        self.before_leaving.clear()
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.channel.send(Close())
        limit = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            while process.read_exit() is None and time.monotonic() < limit:
                _wait_readable(process.status_fd, limit - time.monotonic())
        self.discard()

    def discard(self) -> None:
        """Kill what is left of the ranks and release everything; safe to call twice."""
        self.trusted = False
        for process in self._processes:
            process.kill()
            process.close()
        self._processes = []
        self._pool.forget(self)


def _serialise(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target) -> bytes:
    try:
        return dumps((tuple(args), dict(kwargs)))
    except Exception as error:
        raise InvalidArgument(
            f"{target}: expected arguments that can be sent to ranks, got {type(error).__name__}: {error}. "
            "Pass plain data and tensors, and build the rest inside the function."
        ) from error


def _wait_readable(fd: int, seconds: float) -> None:
    import select

    select.select([fd], [], [], max(0.0, seconds))


class Pool:
    """Worlds by size and backend, all forked from one fork server. Thread-safe; one per process is enough."""

    def __init__(self, preload_modules: Sequence[str] = ()) -> None:
        self.coverage: dict[str, Any] | None = None
        self._lock = threading.RLock()
        self._extra_modules = tuple(preload_modules)
        self._server: ForkServer | None = None
        self._worlds: list[PooledWorld] = []
        self._noted: set[str] = set()
        self._owner = os.getpid()

    def add_preload(self, *modules: str) -> None:
        """Import `modules` in the fork server too; only before it has started."""
        self._extra_modules += tuple(name for name in modules if name not in self._extra_modules)

    def start(self) -> None:
        """Begin starting the fork server without waiting for it."""
        self.server()

    def server(self) -> ForkServer:
        """The fork server, started if it is not there (any more)."""
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = ForkServer(preload.FIRST + self._extra_modules)
            return self._server

    def world(self, size: int, backend: str = "gloo", isolation: str = "warm") -> PooledWorld:
        """Lend a world of `size` ranks; give it back with `release`.

        Args:
            size: number of ranks, at least 1.
            backend: a registered backend.
            isolation: "warm" lends a kept world, "fresh" makes one that ends when it is given back.

        Raises:
            InvalidArgument: for a bad size, isolation or backend name.
            PoolBroken: when no rank can be started.
        """
        _validate(size, backend, isolation)
        key = WorldKey(size, backend)
        with self._lock:
            if isolation == "warm":
                for world in self._worlds:
                    if world.key == key and world.kept and world.trusted and not world.busy:
                        world.busy = True
                        return world
            world = PooledWorld(self, key, kept=isolation == "warm")
            world.busy = True
            self._worlds.append(world)
            return world

    def forget(self, world: PooledWorld) -> None:
        """Drop a closed world."""
        with self._lock, contextlib.suppress(ValueError):
            self._worlds.remove(world)

    def note_modules(self, modules: set[str]) -> None:
        """Remember what ranks had to import themselves, for the next run's preload."""
        self._noted.update(modules)

    def worlds(self) -> tuple[PooledWorld, ...]:
        """The worlds that are open now."""
        with self._lock:
            return tuple(self._worlds)

    def close(self) -> None:
        """End every rank and the fork server; the pool can be used again and starts anew."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            for world in list(self._worlds):
                if world.busy:
                    world.discard()
                else:
                    world.leave()
            if self._server is not None:
                self._server.close()
                self._server = None
            preload.record(self._noted)
            self._noted.clear()


def _validate(size: int, backend: str, isolation: str) -> None:
    from fsdp_testing.backends import registered_backends

    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"world: expected a size of at least 1, got {size!r}. Give the number of ranks.")
    if isolation not in ("warm", "fresh"):
        raise InvalidArgument(f"world: expected isolation 'warm' or 'fresh', got {isolation!r}.")
    if backend not in registered_backends():
        known = ", ".join(registered_backends())
        raise InvalidArgument(f"world: expected a backend among {known}, got {backend!r}. Check the name or register it.")


_default: list[Pool] = []


def default_pool() -> Pool:
    """The pool of this process, closed when the process ends."""
    if not _default or _default[0]._owner != os.getpid():
        _default[:] = [Pool()]
        atexit.register(_default[0].close)
    return _default[0]
