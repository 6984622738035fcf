"""Makes the processes of a launcher one pool: the first gathers the others (`gathered`), which serve ranks to it (`serve`).

Serving is one thread, one loop. Each rank has a connection of its own to the controlling process; what comes from there
goes to the rank, and what the rank says, writes and issues goes there in notes (`fsdp_testing.ranks.pool.remote_rank`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.base import env
from fsdp_testing.errors import HarnessError, PoolBroken
from fsdp_testing.ranks.ledger import memory
from fsdp_testing.ranks.ledger.reading import AreaView
from fsdp_testing.ranks.pool.channel import Channel
from fsdp_testing.ranks.pool.hosts import PATIENCE, Host, Hosts, Meeting, PathQuestion, Place, interface_of
from fsdp_testing.ranks.pool.jobs import Job
from fsdp_testing.ranks.pool.processes import RankProcess, listening_socket, start_rank
from fsdp_testing.ranks.pool.remote_rank import Note, Order, Started, StartRank, keep_alive

if TYPE_CHECKING:
    from fsdp_testing.base.env import Launch
    from fsdp_testing.ranks.pool.controller import Pool

_HANDSHAKE_SECONDS = 20.0
_TOKEN_BYTES = 32
_STACK_SECONDS = 0.8
_TICK_SECONDS = 0.02
_OUTPUTS = ("stdout", "stderr", "stacks")


@contextmanager
def gathered(launch: Launch, pool: Pool, patience: timedelta = PATIENCE) -> Iterator[Hosts]:
    """Meet the other processes, and have `pool` use them while the context is open; in the controlling process.

    After the launcher's SIGTERM the report is still written: running calls end at once and are not judged, and none starts.

    Raises:
        PoolBroken: Names the processes that did not come in time.
    """
    hosts = _gather(launch, patience)
    before: Any = None
    main = threading.current_thread() is threading.main_thread()

    def on_sigterm(number: int, frame: object) -> None:
        del number, frame
        vanished = ", ".join(str(host.place) for host in hosts.lost())
        why = f"{vanished} vanished" if vanished else "the launcher ended this run (SIGTERM)"
        pool.give_up(why)

    if main:
        before = signal.signal(signal.SIGTERM, on_sigterm)
    if pool.worlds():
        pool.close()  # worlds made before would be lent again, on this host alone
    pool.hosts = hosts
    try:
        yield hosts
    finally:
        pool.close()
        pool.hosts, pool.given_up = None, ""
        if main:
            signal.signal(signal.SIGTERM, before)
        for host in hosts.others:
            host.leave()


def _gather(launch: Launch, patience: timedelta) -> Hosts:
    meeting = Meeting(launch, patience)
    token = secrets.token_bytes(_TOKEN_BYTES)
    meeting.put("token", token.hex())
    places: list[Place] = []
    missing: list[int] = []
    for number in range(1, launch.world_size):
        message = meeting.get(f"place/{number}", timedelta(seconds=0.1) if missing else patience)
        if message is None:
            missing.append(number)
        else:
            places.append(Place(**json.loads(message)))
    if missing:
        raise PoolBroken(
            f"{launch.launcher}: expected all {launch.world_size} processes within {patience.total_seconds():.0f} s, got "
            f"nothing from process(es) {', '.join(map(str, missing))}. Start the same command in every one, and look at what "
            "they wrote."
        )
    here = meeting.here(0)
    env.forget_launch()
    hosts: list[Host] = []
    try:
        for place in places:
            hosts.append(Host.of(place, token))
    except PoolBroken:
        for host in hosts:
            host.leave()
        raise
    return Hosts(here, tuple(hosts))


def serve(launch: Launch, pool: Pool, patience: timedelta = PATIENCE) -> None:
    """Serve ranks until the controlling process releases this one.

    Raises:
        PoolBroken: The controlling process did not come in time, or vanished.
    """
    meeting = Meeting(launch, patience)
    token = meeting.get("token", patience)
    if token is None:
        raise PoolBroken(
            f"{launch.launcher}: expected process 0 to take control within {patience.total_seconds():.0f} s, got "
            "nothing from it. Start the same command in every process, and look at what that one wrote."
        )
    place = meeting.here(0)
    with listening_socket(place.address) as listener:
        place = replace(place, port=listener.getsockname()[1])
        meeting.put(f"place/{launch.rank}", json.dumps(asdict(place)))
        env.forget_launch()
        server = _Server(place, bytes.fromhex(token), pool, listener)
        try:
            server.run(patience.total_seconds())
        finally:
            server.close()


@dataclass(eq=False, slots=True)
class _Ledger:
    """The shared memory of the ranks of one world that are on this host."""

    descriptor: int
    memory: memory.LedgerMemory
    ranks: int = 0


@dataclass(eq=False, slots=True)
class _Relay:
    """One rank: its process here, and the connection to the controlling process."""

    world: int
    rank: RankProcess
    channel: Channel
    job: int = 0
    stacks_until: float = 0.0
    quiet: int = 0

    def note(self, *, look: bool = False) -> Note:
        """Return the rank's news."""
        ended = self.rank.read_exit()  # first: by then everything that the rank sent before its end has arrived
        reports = tuple(self.rank.channel.take_ready())
        output = {name: text for name in _OUTPUTS if (text := self.rank.take_output(name))}
        return Note(
            reports=reports,
            exit=ended,
            output=output,
            ledger=self.rank.ledger.copy(self.job),
            problem=self.rank.channel.problem,
            answers_look=look,
        )

    def hand_on(self, message: object) -> bool:
        """Carry out messages of the controlling process; False when the rank must end."""
        if message == Order.KILL:
            return False
        if message == Order.LOOK:
            self.channel.send(self.note(look=True))
        elif message == Order.STACKS:
            self.rank.request_stacks()
            self.stacks_until, self.quiet = time.monotonic() + _STACK_SECONDS, 0
        else:
            if isinstance(message, Job):
                self.job = message.number
                self.rank.take_output("stacks")
                self.rank.empty_output()
            with contextlib.suppress(OSError):  # a dead rank is known by its exit status
                self.rank.channel.send(message)
        return True

    def send_stacks(self) -> None:
        """Send the output since the last time; a complete stack grows no more."""
        text = self.rank.take_output("stacks")
        self.quiet = 0 if text else self.quiet + 1
        if text:
            self.channel.send(Note(output={"stacks": text}))
        if self.quiet * _TICK_SECONDS > _STACK_SECONDS / 2:
            self.stacks_until = 0.0


class _Server:
    def __init__(self, place: Place, token: bytes, pool: Pool, listener: socket.socket) -> None:
        self._place = place
        self._token = token
        self._pool = pool
        self._listener = listener
        self._interface = interface_of(place.address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._control: Channel | None = None
        self._relays: set[_Relay] = set()
        self._ledgers: dict[int, _Ledger] = {}

    def run(self, patience: float) -> None:
        """Serve until the controlling process ends the run.

        Raises:
            PoolBroken: It did not come within `patience` seconds, or ended silently.
        """
        limit = time.monotonic() + patience
        while True:
            wait = None if self._control is not None else limit - time.monotonic()
            if wait is not None and wait <= 0:
                raise PoolBroken(
                    f"{self._place}: expected the controlling process within {patience:.0f} s, got no connection."
                )
            with_stacks = [relay for relay in self._relays if relay.stacks_until > time.monotonic()]
            for key, _ in self._selector.select(_TICK_SECONDS if with_stacks else wait):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Channel):
                    if not self._obey(key.data):
                        return
                elif key.data in self._relays:
                    self._relay(key.data, key.fileobj)
            for relay in with_stacks:
                if relay in self._relays:
                    self._guarded(relay, relay.send_stacks)

    def _accept(self) -> None:
        """Accept a connection whose first bytes are the token: the first connection controls, each later one is for a rank."""
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.settimeout(_HANDSHAKE_SECONDS)
            shown = b""
            with contextlib.suppress(OSError):
                while len(shown) < len(self._token) and (more := sock.recv(len(self._token) - len(shown))):
                    shown += more
            if not hmac.compare_digest(shown, self._token):
                sock.close()
                return
            channel = Channel(keep_alive(sock), send_timeout=_HANDSHAKE_SECONDS)
            if self._control is None:
                self._control = channel
                self._selector.register(channel, selectors.EVENT_READ, channel)
                return
            try:
                request = channel.receive()
            except EOFError:
                channel.close()
                return
            try:
                self._start(channel, request)
            except (HarnessError, OSError) as error:
                channel.send(Started(problem=f"{type(error).__name__}: {error}"))
                channel.close()

    def _start(self, channel: Channel, request: StartRank) -> None:
        ledger = self._ledgers.get(request.world)
        if ledger is None:
            descriptor = memory.create(request.areas)
            ledger = self._ledgers[request.world] = _Ledger(descriptor, memory.LedgerMemory(descriptor, request.areas))
        ledger.ranks += 1
        boot = replace(request.bootstrap, environment=env.snapshot(), interface=self._interface)
        view = ledger.descriptor, AreaView(ledger.memory.areas[boot.rank])
        try:
            rank, port = start_rank(self._pool.server(), boot, view, serves_store=request.serves_store)
        except BaseException:
            self._drop_ledger(request.world)
            raise
        relay = _Relay(request.world, rank, channel)
        self._relays.add(relay)
        channel.send(Started(rank.pid, port))
        for source in (channel, *rank.sources):
            self._selector.register(source, selectors.EVENT_READ, relay)

    def _obey(self, control: Channel) -> bool:
        """Do what the controlling process asks of this host; False when it releases this process."""
        for message in control.take_ready():
            if message is None:
                return False
            if isinstance(message, PathQuestion):
                control.send((message.path, Path(message.path).exists()))
        if control.closed:
            raise PoolBroken(f"{self._place}: the controlling process vanished. Look at what it wrote.")
        return True

    def _relay(self, relay: _Relay, source: Any) -> None:
        if source is relay.channel:
            self._guarded(relay, lambda: self._from_controller(relay))
        else:
            self._guarded(relay, lambda: self._from_rank(relay, source))

    def _guarded(self, relay: _Relay, step: Callable[[], None]) -> None:
        """Run one step of a relay; when its connection ends, its rank ends."""
        try:
            step()
        except OSError:
            self._end(relay)

    def _from_controller(self, relay: _Relay) -> None:
        for message in relay.channel.take_ready():
            if not relay.hand_on(message):
                self._end(relay)
                return
        if relay.channel.closed:
            self._end(relay)

    def _from_rank(self, relay: _Relay, source: Any) -> None:
        note = relay.note()
        if relay.rank.channel.closed if source is relay.rank.channel else note.exit is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)
        relay.channel.send(note)

    def _end(self, relay: _Relay) -> None:
        self._relays.discard(relay)
        for source in (relay.channel, *relay.rank.sources):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)
        relay.rank.kill()
        relay.rank.close()
        relay.channel.close()
        self._drop_ledger(relay.world)

    def _drop_ledger(self, world: int) -> None:
        ledger = self._ledgers[world]
        ledger.ranks -= 1
        if ledger.ranks == 0:
            ledger.memory.close()
            os.close(ledger.descriptor)
            del self._ledgers[world]

    def close(self) -> None:
        """End every rank, and the fork server."""
        for relay in list(self._relays):
            self._end(relay)
        self._selector.close()
        if self._control is not None:
            self._control.close()
        self._pool.close()
