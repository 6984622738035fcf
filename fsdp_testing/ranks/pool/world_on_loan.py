"""A world on loan: runs calls, one at a time, until it is given back."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.base import env
from fsdp_testing.base.backends import backend_named
from fsdp_testing.errors import InvalidArgument, PoolBroken
from fsdp_testing.ranks.ledger import memory
from fsdp_testing.ranks.ledger.reading import AreaView
from fsdp_testing.ranks.pool.channel import dumps, readable
from fsdp_testing.ranks.pool.device_slots import Lease
from fsdp_testing.ranks.pool.jobs import Bootstrap, Job, StandInRank
from fsdp_testing.ranks.pool.outcome import Fate, WorldOutcome
from fsdp_testing.ranks.pool.processes import RankProcess, environment_for_ranks, loopback, memory_file, start_rank
from fsdp_testing.ranks.pool.remote_rank import RemoteRank, StartRank
from fsdp_testing.ranks.pool.server import directory
from fsdp_testing.ranks.pool.supervision import Supervision
from fsdp_testing.ranks.pool.targets import Target, target_of

if TYPE_CHECKING:
    from fsdp_testing.ranks.pool.controller import Pool

_LEAVE_SECONDS = 5.0
# pytest sets it for every phase of every test.
_NOT_FOLLOWED = (b"PYTEST_CURRENT_TEST", b"GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class WorldKey:
    """What makes two worlds interchangeable."""

    size: int
    backend: str


class PooledWorld:
    """A world on loan: `size` ranks that run one call at a time, all of them the same call.

    Attributes:
        key: Size and backend.
        reusable: Whether the world is lent again after it was given back.
        trusted: False once anything failed or leaked in it; then it is not lent again.
        busy: Whether it is on loan.
        patient: Whether ranks end on their own until it is given back: a failed rank exits, none is stopped before the timeout.
        before_leaving: Called with the world shortly before it ends, while its ranks still answer.
    """

    def __init__(self, pool: Pool, key: WorldKey, *, reusable: bool, lease: Lease | None = None) -> None:
        self.key = key
        self.reusable = reusable
        self.trusted = True
        self.busy = False
        self.patient = False
        self.before_leaving: list[Callable[[PooledWorld], None]] = []
        self._pool = pool
        backend = backend_named(key.backend)
        self._single = backend.single_process
        self._lockstep = backend.makes_group and not backend.single_process
        self._running = threading.Lock()
        self._owner = os.getpid()
        self._jobs = 0
        self._number = pool.next_number()
        self._joined = False
        self._place = StandInRank(0, key.size) if self._single else None
        self._before = ""
        self._sys_path: list[str] = []
        self._directory = ""
        self._environment: dict[bytes, bytes] = {}
        self._lease = lease
        self._processes: list[RankProcess | RemoteRank] = []
        self._ledger: memory.LedgerMemory
        self._open()

    def _start(
        self, count: int, ledger_fd: int, store: int | None, settings: dict[str, Any]
    ) -> list[RankProcess | RemoteRank]:
        hosts = self._pool.hosts
        layout = hosts.layout(count, self._number) if hosts is not None else (None,) * count
        devices = self._lease.devices if self._lease is not None else ()
        boot = Bootstrap(
            *(0, self.key.size, self.key.backend, 0), **settings, devices=devices, coverage=self._pool.coverage
        )
        processes: list[RankProcess | RemoteRank] = []
        with contextlib.ExitStack() as undo:
            for rank, host in enumerate(layout):
                mine = replace(boot, rank=rank)
                mine = hosts.placed(mine, layout) if hosts is not None else mine
                serves = rank == 0 and not self._single and store is None
                process: RankProcess | RemoteRank
                if host is None:
                    ledger = ledger_fd, AreaView(self._ledger.areas[rank])
                    process, port = start_rank(self._pool.server(), mine, ledger, serves_store=serves, store=store)
                else:
                    process = host.start(StartRank(self._number, count, mine, serves))
                    port = process.store_port
                processes.append(process)
                # Undone backwards: killed first, then released.
                undo.callback(process.close)
                undo.callback(process.kill)
                boot = replace(boot, store_port=port)
            undo.pop_all()
        return processes

    @property
    def has_devices(self) -> bool:
        return self._lease is not None

    @property
    def whole(self) -> bool:
        return bool(self._processes) and all(process.there for process in self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def lend(self) -> PooledWorld:
        """Mark the world as on loan."""
        self.busy = True
        return self

    def at(self, rank: int) -> PooledWorld:
        """In a single-process world: stand for `rank` until the world is given back.

        Raises:
            InvalidArgument: For a rank outside the world, or a world whose ranks are processes.
        """
        if not self._single:
            raise InvalidArgument(
                f"world.at: expected a backend of one process, such as 'fake', got {self.key.backend!r}. "
                "Every rank of this world exists; ask for its result instead."
            )
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.key.size:
            raise InvalidArgument(f"world.at: expected a rank from 0 to {self.key.size - 1}, got {rank!r}.")
        self._place = StandInRank(rank, self.key.size)
        return self

    def execute(
        self,
        target: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = 60.0,
        name: str = "",
        lasting: frozenset[str] | None = frozenset(),
    ) -> WorldOutcome:
        """Call `target(*args, **kwargs)` on every rank and wait until all have ended.

        Args:
            target: An importable function, or "package.module:function".
            args: Sent once, the same to every rank.
            kwargs: Likewise.
            timeout: Seconds until a rank counts as hung, from the moment when all are in the world; None: no limit.
            name: Shown in messages.
            lasting: Kinds of process state (as in `hygiene.PROBES`) that the call may change for good; other changes are
                restored and reported. None: nothing is compared.

        Returns:
            The account of every rank. When it is not `ok`, or something leaked, the world is not lent again.

        Raises:
            UnsendableFunction, InvalidArgument: Before anything is sent.
            PoolBroken: When the world has been closed, runs another call, or belongs to another process.
        """
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise InvalidArgument(f"timeout: expected seconds above 0, or None for no limit, got {timeout!r}.")
        reference = target if isinstance(target, Target) else target_of(target)
        arguments = _serialise(args, kwargs or {}, reference)
        self._check_usable()
        if not self._running.acquire(blocking=False):
            raise PoolBroken(
                "world.execute: expected an idle world, got one that runs a call for another thread. "
                "Ask the pool for a world in each thread."
            )
        try:
            call = reference, name or str(reference), arguments, timeout, lasting
            outcome = self._supervise(*call)
            unbegun = not any(rank.began for rank in outcome.ranks) and any(r.fate is Fate.DIED for r in outcome.ranks)
            if unbegun and self._before and not self.before_leaving:
                # The ranks had died before any of them began the call: it can be repeated on a new world.
                self._replace_processes()
                outcome = self._supervise(*call)
            self._before = name or str(reference)
            self._judge(outcome)
            return outcome
        finally:
            self._running.release()

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise PoolBroken(
                "world.execute: expected the process that made the world, got a forked child of it. "
                "Use run_ranks in the child, which makes worlds of its own."
            )
        if not self._processes:
            raise PoolBroken("world.execute: expected an open world, got one that is closed. Ask the pool for another.")

    def _judge(self, outcome: WorldOutcome) -> None:
        if not outcome.ok or any(rank.dirt for rank in outcome.ranks):
            self.trusted = False
        garbled = any(rank.error is not None and rank.error.type_name == "ChannelGarbled" for rank in outcome.ranks)
        # After a rank died, hung or was stopped, the state of the others is unknown: no second call on any of them.
        if garbled or any(rank.fate not in (Fate.RETURNED, Fate.RAISED) for rank in outcome.ranks):
            self.discard()

    def _supervise(
        self, target: Target, name: str, arguments: bytes, timeout: float | None, lasting: frozenset[str] | None
    ) -> WorldOutcome:
        supervision = Supervision(
            self._processes,
            self._job(target, name, arguments, lasting),
            self.key.size,
            self.key.backend,
            timeout,
            single_process=self._single,
            lockstep=self._lockstep,
            joined=self._joined,
            patient=self.patient,
        )
        finished = False
        try:
            outcome = supervision.run()
            finished = True
        finally:
            # Ctrl-C, or an error of ours, leaves ranks in an unknown state.
            if not finished:
                self.discard()
        self._joined = supervision.joined
        self.trusted &= not supervision.worn
        self._refuse_what_was_lost(outcome)
        self._pool.note(self.key, outcome, supervision.new_modules)
        if self._before and any(rank.fate is Fate.DIED and not rank.began for rank in outcome.ranks):
            outcome = replace(outcome, suspect=self._before)
        return outcome

    def _refuse_what_was_lost(self, outcome: WorldOutcome) -> None:
        """Refuse to judge a call during which a host vanished or the launcher ended the run.

        Raises:
            PoolBroken: It names the ranks and hosts; the verdict is unknown.
        """
        lost = [process for process in self._processes if isinstance(process, RemoteRank) and process.lost]
        if not lost and not self._pool.given_up:
            return
        self.discard()
        losses = "; ".join(f"rank {process.rank} was lost with {process.host}" for process in lost)
        if lost:
            self._pool.give_up(f"{', '.join(dict.fromkeys(process.host for process in lost))} vanished")
        raise PoolBroken(f"{outcome.name}: {losses or self._pool.given_up}\n{outcome.describe()}")

    def _replace_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.close()
        self._processes = []
        self._ledger.close()
        self._joined = False
        self._before = ""
        self.before_leaving.clear()
        self._open()

    def _open(self) -> None:
        """Start the ranks, with a ledger of their own."""
        settings = environment_for_ranks()
        self._sys_path = settings["sys_path"]
        self._directory = settings["directory"]
        self._environment = env.encoded()
        count = 1 if self._single else self.key.size
        with contextlib.ExitStack() as opened:
            ledger_fd = memory.create(count)
            # Closed once all ranks are forked: each has a copy of its own.
            opened.callback(os.close, ledger_fd)
            store = None
            # Ranks of other hosts, and code that makes groups as under torchrun, need a store on the network.
            if self._lockstep and self._pool.hosts is None:
                store = memory_file("store")
                opened.callback(os.close, store)
            self._ledger = memory.LedgerMemory(ledger_fd, count)
            if self._pool.hosts is None and not self._single:
                settings["store_host"] = loopback()
            self._processes = self._start(count, ledger_fd, store, settings)

    def _job(self, target: Target, name: str, arguments: bytes, lasting: frozenset[str] | None) -> Job:
        self._jobs += 1
        sys_path = where = None
        if sys.path != self._sys_path:
            sys_path = self._sys_path = list(sys.path)
        if directory() != self._directory:
            where = self._directory = directory()
        environment = self._changed_environment()
        return Job(self._jobs, name, target, arguments, lasting, sys_path, environment, where, self._place)

    def _changed_environment(self) -> dict[str, str | None] | None:
        now, before = env.encoded(), self._environment
        if now == before:
            return None
        self._environment = now
        changed = {name for name in {*now, *before} if now.get(name) != before.get(name)}
        changed.difference_update(_NOT_FOLLOWED)
        return {os.fsdecode(name): os.fsdecode(now[name]) if name in now else None for name in changed} or None

    def distrust(self) -> None:
        """Have this world replaced once it is given back; for users that know it is no longer clean."""
        self.trusted = False

    def release(self) -> None:
        """Give the world back; ends it if it cannot be lent again."""
        if os.getpid() != self._owner:
            return
        if self._single:
            self._place = StandInRank(0, self.key.size)
        if not self.trusted or not self.reusable or (self._lease is not None and self._pool.devices_awaited()):
            self.leave()
        self.patient = False
        # Last: from now on another thread may borrow it.
        self.busy = False

    def leave(self) -> None:
        """End the ranks; gracefully if there is something to lose (coverage, fixtures that live in them)."""
        if os.getpid() != self._owner:
            return
        try:
            while self.before_leaving and self._processes:
                # Removed before it is called: a callback may end the world, which calls the others.
                self.before_leaving.pop(0)(self)
            if self._pool.coverage is not None:
                self._close_gracefully()
        finally:
            self.discard()

    def _close_gracefully(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.channel.send(None)
        limit = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            while process.read_exit() is None and time.monotonic() < limit:
                readable(process.sources[-1], limit - time.monotonic())

    def kill_ranks(self) -> None:
        """Kill the ranks of a world while another thread waits for a call in it; that thread notices, and releases the rest.

        Their descriptors stay open until then: a selector does not notice a closed descriptor, and its thread would wait for
        the deadline of the call.
        """
        self.trusted = False
        for process in self._processes:
            process.kill()

    def discard(self) -> None:
        """Kill the remaining ranks and release everything; safe to call twice."""
        if os.getpid() != self._owner:
            return
        self.trusted = False
        self.before_leaving.clear()
        # Exchanged first: a second caller, from another thread or a callback, finds nothing left to do.
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.close()
        if processes:
            self._ledger.close()
        if self._lease is not None:
            self._lease.release()
        self._pool.forget(self)


def _serialise(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target) -> bytes:
    try:
        return dumps((tuple(args), dict(kwargs)))
    except Exception as error:
        raise InvalidArgument(
            f"{target}: expected arguments that can be sent to ranks, got {type(error).__name__}: {error}. "
            "Pass plain data and tensors, and build the rest inside the function."
        ) from error
