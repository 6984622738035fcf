"""A rank on another host, watched over one connection to that host's serving process.

That process (`fsdp_testing.ranks.pool.serving`) forks the rank as this one would, hands jobs on, and sends notes: the rank's
reports, what it wrote, its ledger, its end. When the connection ends before that note, the rank is
lost with its host.

Trust: whoever connects must know the token of the launch (`fsdp_testing.ranks.pool.hosts`); messages are pickles.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.ledger.reading import ReportedLedger
from fsdp_testing.ranks.pool.channel import Channel, readable
from fsdp_testing.ranks.pool.jobs import Bootstrap, Exit, Report

_START_SECONDS = 150.0  # the first rank of a host waits for its import of torch
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_SEND_SECONDS = 20.0
# A host without power closes no connection: the kernel asks after 5 s of silence, three times.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 11_000))


class Order(StrEnum):
    """What the controller asks of the process that serves a rank."""

    LOOK = "look"
    STACKS = "stacks"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class StartRank:
    """Fork a rank for world number `world`, of which `areas` ranks have a ledger; `serves_store` says that it is rank 0."""

    world: int
    areas: int
    bootstrap: Bootstrap
    serves_store: bool


@dataclass(frozen=True, slots=True)
class Started:
    """The answer: the rank's process, the port of the world's store if the rank serves it, or why there is no rank."""

    pid: int = 0
    store_port: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """News of a rank; `now` is read on the serving host's monotonic clock, which is not the controller's."""

    reports: tuple[Report, ...] = ()
    exit: Exit | None = None
    output: dict[str, str] = field(default_factory=dict)
    ledger: ReportedLedger | None = None
    problem: str = ""
    answers_look: bool = False
    now: float = field(default_factory=time.monotonic)


def keep_alive(sock: socket.socket) -> socket.socket:
    """Have the kernel notice a peer that vanished silently."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


class _RankChannel(Channel):
    """Passes notes to their rank, and returns the reports in them.

    `started` is the host's answer to `StartRank`, once it has come; the first notes may come with it.
    """

    def __init__(self, sock: socket.socket, take: Callable[[Note], None]) -> None:
        super().__init__(sock, send_timeout=_SEND_SECONDS)
        self._take = take
        self._reports: list[Any] = []
        self.started: Started | None = None
        self._sending = threading.RLock()  # the launcher's signal may arrive while this thread sends

    def send_data(self, data: bytes) -> None:
        """Send one message; several threads may."""
        with self._sending:
            super().send_data(data)

    def pump(self) -> None:
        """Take in what has come, and keep reports for `take_ready`."""
        for note in super().take_ready():
            if isinstance(note, Started):
                self.started = note
                continue
            self._take(note)
            self._reports += note.reports
            self.problem = self.problem or note.problem

    def wait_for_start(self) -> Started:
        """Return the host's answer, or one that says that none came."""
        limit = time.monotonic() + _START_SECONDS
        while self.started is None and not self.closed and readable(self.fileno(), limit - time.monotonic()):
            self.pump()
        return self.started or Started(problem="no answer")

    def take_ready(self) -> list[Any]:
        """Return every report that has arrived."""
        self.pump()
        reports, self._reports = self._reports, []
        return reports


class RemoteRank:
    """One rank's process on another host; to its world it looks like a `RankProcess`.

    Args:
        host: Name of the serving process, for messages.
        sock: A connection to it on which the token was sent.
        start: The rank to start.

    Attributes:
        lost: Whether the host vanished before it said how the rank ended.
        store_port: Port of the world's store, if this rank serves it.

    Raises:
        PoolBroken: The host has no room for it, or vanished.
    """

    def __init__(self, host: str, sock: socket.socket, start: StartRank) -> None:
        self.rank = start.bootstrap.rank
        self.host = host
        self.ledger = ReportedLedger()
        self.lost = False
        self._exit: Exit | None = None
        self._output: dict[str, str] = {}
        self._looked = 0.0
        self._waiting_for_look = False
        self._killed = False
        self.channel = _RankChannel(sock, self._take)
        with contextlib.suppress(OSError):  # a lost host gives no answer
            self.channel.send(start)
        started = self.channel.wait_for_start()
        if started.problem:
            self.channel.close()
            raise PoolBroken(f"{host}: expected a new rank, got {started.problem}. Look at what that process wrote.")
        self.pid, self.store_port = started.pid, started.store_port

    def _take(self, note: Note) -> None:
        # Hosts have different clocks: shift moments by their difference, and by the time that the note took.
        ahead = time.monotonic() - note.now
        if note.exit is not None:
            self._exit = replace(note.exit, moment=note.exit.moment + ahead)
        for name, text in note.output.items():
            self._output[name] = self._output.get(name, "") + text
        if note.ledger is not None:
            self.ledger = note.ledger
        if note.answers_look:
            self._waiting_for_look = False

    @property
    def sources(self) -> tuple[Channel | int, ...]:
        """Descriptors that become readable when there is news of the rank, including its end."""
        return (self.channel,)

    def read_exit(self) -> Exit | None:
        """Return how the rank ended, once its host has said so or has vanished."""
        if self._exit is None and self.channel.closed and self._killed:
            self._exit = Exit(None, "SIGKILL", time.monotonic())
        elif self._exit is None and self.channel.closed and not self.channel.problem:
            self._lose()
        return self._exit

    def _lose(self) -> None:
        self.lost = True
        self._exit = Exit(None, f"the loss of {self.host}", time.monotonic())

    @property
    def there(self) -> bool:
        """Whether the rank can be given a call."""
        self.channel.pump()
        return self.read_exit() is None and not self.channel.closed

    def look(self, *, wait: bool = False) -> None:
        """Ask for the ledger and output as they are now; a host that does not answer is lost.

        Args:
            wait: Wait for the answer. Otherwise it is read later, before the next question is sent.
        """
        now = time.monotonic()
        if self._exit is not None or (not wait and (self._waiting_for_look or now - self._looked < _LOOK_SECONDS)):
            return
        self._looked, self._waiting_for_look = now, True
        self._order(Order.LOOK)
        while wait and self._waiting_for_look and not self.channel.closed:
            if not readable(self.channel.fileno(), now + _ANSWER_SECONDS - time.monotonic()):
                self._lose()
                return
            self.channel.pump()
        if wait:
            self.read_exit()

    def computes(self) -> bool:
        """Return whether the rank is known to compute: never, since the host's answer would be out of date on arrival."""
        return False

    def request_stacks(self) -> None:
        """Ask for the Python stacks of all threads; they come as output."""
        self._order(Order.STACKS)

    def kill(self) -> None:
        """End the rank and its process group; its host closes the connection."""
        self._killed = True
        self._order(Order.KILL)

    def _order(self, order: Order) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(order)

    def take_output(self, name: str) -> str:
        """Return the text of `stdout`, `stderr` or `stacks` that has arrived since the last call."""
        self.channel.pump()
        return self._output.pop(name, "")

    def empty_output(self) -> None:
        """Forget output of earlier jobs; the host does the same when it hands a job on."""
        self._output.clear()

    def close(self) -> None:
        """Close the connection; the host then ends the rank if it still runs."""
        self.channel.close()
