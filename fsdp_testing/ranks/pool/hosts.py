"""The processes of a launcher, as one pool sees them: they meet in its store; the first controls, the others serve ranks.

The launcher (torchrun, srun, mpirun) made the processes; none of them is a rank itself, since a rank that dies or hangs must
not take its host with it, and a launcher ends everything when one of its processes ends. Each process forks the ranks that
are its part of a world; ranks of one world lie on as many hosts as there are.

Trust is the launcher's: whoever can read its store knows the token, and can have code run here. It is for a network of
your own, as the store is.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from fsdp_testing.errors import InvalidArgument, PoolBroken
from fsdp_testing.ranks.pool.channel import Channel, readable
from fsdp_testing.ranks.pool.remote_rank import RemoteRank, StartRank, keep_alive

if TYPE_CHECKING:
    from fsdp_testing.base.env import Launch
    from fsdp_testing.ranks.pool.jobs import Bootstrap

PATIENCE = timedelta(seconds=180)
_CONNECT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of the launcher runs, as it reports itself.

    Attributes:
        number: Among the launcher's processes; 0 controls.
        machine: Name of its host.
        node: Number of its host, where the launcher gives one.
        address: The address at which the others reach it.
        port: Where it waits for the controlling process; 0 for the controlling process.
        processors: Number that it may use.
    """

    number: int
    machine: str
    node: str
    address: str
    port: int
    processors: int

    def __str__(self) -> str:
        node = f", node {self.node}" if self.node else ""
        return f"process {self.number} of the launcher on host {self.machine} ({self.address}{node})"


@dataclass(frozen=True, slots=True)
class PathQuestion:
    """Ask a host whether it sees this file."""

    path: str


@dataclass(eq=False, slots=True)
class Host:
    """The controlling process's view of a serving process. Their connection stays open while both live."""

    place: Place
    token: bytes
    control: Channel
    _asking: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, place: Place, token: bytes) -> Host:
        return cls(place, token, Channel(_connected(place, token), send_timeout=_CONNECT_SECONDS))

    @property
    def lost(self) -> bool:
        """Whether the process has gone."""
        return self.control.at_end()

    def start(self, request: StartRank) -> RemoteRank:
        """Have a rank forked there.

        Raises:
            PoolBroken: The host has gone, or has no room.
        """
        return RemoteRank(str(self.place), _connected(self.place, self.token), request)

    def sees(self, path: str) -> bool:
        """Return whether that host sees a file of this host under the same name."""
        with self._asking:
            with suppress(OSError):  # a lost host gives no answer
                self.control.send(PathQuestion(path))
            limit = time.monotonic() + _CONNECT_SECONDS
            while not self.control.closed and readable(self.control, limit - time.monotonic()):
                # Skip a late answer to an earlier question.
                if (answer := dict(self.control.take_ready())).keys() & {path}:
                    return bool(answer[path])
            return False

    def leave(self) -> None:
        """Let the process end in peace."""
        with suppress(OSError):
            self.control.send(None)
        self.control.close()


@dataclass(frozen=True, slots=True)
class Hosts:
    """The processes of a launcher: the place of the controlling process, and the others by number."""

    here: Place
    others: tuple[Host, ...]

    def layout(self, size: int, turn: int) -> tuple[Host | None, ...]:
        """Return the process that forks each rank of a world; None: this process.

        Ranks are placed side by side in the order of processes. A world that does not need all of them starts at another process
        each `turn`, so that concurrent worlds are on different hosts.
        """
        count = 1 + len(self.others)
        first = 0 if size >= count else turn
        numbers = [(first + rank * count // size) % count for rank in range(size)]
        return tuple(None if number == 0 else self.others[number - 1] for number in numbers)

    def placed(self, boot: Bootstrap, layout: Sequence[Host | None]) -> Bootstrap:
        """Complete the bootstrap of a rank: how it reaches the others, and how many of them are on its machine."""
        places = [host.place if host is not None else self.here for host in layout]
        machines = [place.machine for place in places]
        boot = replace(boot, ranks_here=machines.count(machines[boot.rank]))
        if all(place is places[0] for place in places):
            return boot
        # A serving process puts its own interface in place of this one's.
        return replace(boot, store_host=places[0].address, interface=interface_of(self.here.address))

    @property
    def processors(self) -> int:
        """Of all machines together."""
        return sum({place.machine: place.processors for place in self.places}.values())

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.here, *(host.place for host in self.others))

    def blind_to(self, path: str) -> tuple[str, ...]:
        """Return the names of the hosts that lack `path`."""
        return tuple(str(host.place) for host in self.others if not host.sees(path))

    def lost(self) -> tuple[Host, ...]:
        """Return the lost hosts."""
        return tuple(host for host in self.others if host.lost)

    def describe(self) -> str:
        """Return one line about all of them."""
        machines = {place.machine: 0 for place in self.places}
        for place in self.places:
            machines[place.machine] += 1
        counts = ", ".join(f"{count} on {name}" for name, count in machines.items())
        return f"{len(self.places)} processes of the launcher ({counts})"


class Meeting:
    """The launcher's store, in which every process finds the others.

    Raises:
        PoolBroken: The store does not answer in time.
    """

    def __init__(self, launch: Launch, patience: timedelta) -> None:
        import torch.distributed as dist

        self._launch = launch
        serves = launch.rank == 0 and not launch.store_is_there
        self._where = f"{launch.master_addr}:{launch.master_port}"
        try:
            store = dist.TCPStore(
                launch.master_addr, launch.master_port, None, serves, patience, wait_for_workers=False
            )
            meetings = dist.PrefixStore(f"fsdp_testing/{launch.attempt}", store)
            # Commands that one script runs one after the other meet in the same store.
            turn = meetings.add(f"meetings/{launch.rank}", 1)
        except Exception as error:  # its class differs between releases of torch
            raise PoolBroken(
                f"{launch.launcher}: expected a store at {self._where} (MASTER_ADDR, MASTER_PORT) within "
                f"{patience.total_seconds():.0f} s, got {type(error).__name__}: {str(error).splitlines()[0]}. Start "
                "the same command in all processes, with a port that is free on the first host."
            ) from error
        self._store = dist.PrefixStore(str(turn), meetings)

    def put(self, name: str, text: str) -> None:
        """Tell the others."""
        self._store.set(name, text)

    def get(self, name: str, patience: timedelta) -> str | None:
        """Return what another process sent; None if nothing came in time."""
        try:
            self._store.wait([name], patience)
            return bytes(self._store.get(name)).decode()
        except Exception:  # likewise; a lost store is noticed by its silence
            return None

    def here(self, port: int) -> Place:
        """Return this process's own place."""
        return Place(
            self._launch.rank,
            socket.gethostname(),
            self._launch.node,
            own_address(self._launch),
            port,
            len(os.sched_getaffinity(0)),
        )


def own_address(launch: Launch) -> str:
    """Return the address of this machine on its way to the launcher's store; nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise InvalidArgument(
            f"environment: expected an address in MASTER_ADDR, got {launch.master_addr!r} ({error}). Give the first host's."
        ) from error


def interface_of(address: str) -> str:
    """Return the network interface that has `address`; empty when none is found, so that gloo chooses."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return "lo"
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address of version 4
                answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _connected(place: Place, token: bytes) -> socket.socket:
    try:
        sock = socket.create_connection((place.address, place.port), _CONNECT_SECONDS)
    except OSError as error:
        raise PoolBroken(
            f"{place}: expected it to answer at {place.address}:{place.port}, got {error}. Either it has ended, or a "
            "firewall is between the hosts, or MASTER_ADDR means another address there."
        ) from error
    keep_alive(sock).sendall(token)
    return sock
