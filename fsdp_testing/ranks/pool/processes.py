"""One rank's process: the controller starts, watches and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_testing.base import env
from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.ledger.reading import AreaView
from fsdp_testing.ranks.pool.channel import Channel
from fsdp_testing.ranks.pool.jobs import LOOPBACK, Bootstrap, Exit
from fsdp_testing.ranks.pool.server import ForkServer, directory

_SEND_SECONDS = 20.0
_OUTPUTS = ("stdout", "stderr", "stacks")
# Output files live in memory and are emptied between jobs once they have grown to this.
_KEPT_BYTES = 1 << 20


class RankProcess:
    """One rank's process: its channel, output files and exit status."""

    def __init__(self, server: ForkServer, rank: int, ledger: tuple[int, AreaView], more: dict[str, int]) -> None:
        self.rank = rank
        self.lost = False
        descriptor, self.ledger = ledger
        self.exit: Exit | None = None
        self._closed = False
        self._seen = dict.fromkeys(_OUTPUTS, 0)
        with contextlib.ExitStack() as undo:
            mine, theirs = socket.socketpair()
            undo.callback(mine.close)
            self.channel = Channel(mine, send_timeout=_SEND_SECONDS)
            self._status, status_write = os.pipe()
            undo.callback(os.close, self._status)
            # Polled for news; never waited for.
            os.set_blocking(self._status, False)
            self._files: dict[str, int] = {}
            for name in _OUTPUTS:
                self._files[name] = memory_file(name)
                undo.callback(os.close, self._files[name])
            fds = {"conn": theirs.fileno(), "ledger": descriptor, "status": status_write, **self._files, **more}
            try:
                self.pid = server.fork(fds)
            finally:
                theirs.close()
                os.close(status_write)
            undo.pop_all()

    @property
    def sources(self) -> tuple[Channel | int, ...]:
        """Descriptors that become readable when there is news of the rank; the last one when it has ended."""
        return self.channel, self._status

    def read_exit(self) -> Exit | None:
        """Exit status, once the fork server has reported it."""
        if self.exit is None and not self._closed:
            with contextlib.suppress(BlockingIOError):
                self.exit = _exit_from(os.read(self._status, 64).decode())
        return self.exit

    def look(self, *, wait: bool = False) -> None:
        """Nothing to do: the ledger of a rank on this machine is always up to date."""

    @property
    def there(self) -> bool:
        """Whether the rank can be given a call. Its end of the channel closes before its exit status is known."""
        return not self._closed and self.read_exit() is None and not self.channel.at_end()

    def computes(self) -> bool:
        """Return whether one of its threads runs or is ready to run now; a thread that waits for a peer does not count."""
        try:
            threads = list(Path(f"/proc/{self.pid}/task").iterdir())
        except OSError:  # it has ended since
            return False
        for thread in threads:
            with contextlib.suppress(OSError):
                if (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("R", "D"):
                    return True
        return False

    def request_stacks(self) -> None:
        """Ask for the Python stacks of all threads; answered in C, without the GIL."""
        if self.read_exit() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the rank and its process group; the fork server ends the rest when it notices.

        A rank that has ended is not signalled: its number may be another process's by now.
        """
        if self.read_exit() is None and not self._closed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def take_output(self, name: str) -> str:
        """Return the text written since the last call to `stdout`, `stderr` or `stacks`."""
        fd = self._files[name]
        start = self._seen[name]
        parts: list[bytes] = []
        while (size := os.fstat(fd).st_size) > start and (data := os.pread(fd, size - start, start)):
            parts.append(data)
            start += len(data)
        self._seen[name] = start
        return b"".join(parts).decode("utf-8", "replace")

    def empty_output(self) -> None:
        """Free the memory of long output; only while the rank is idle."""
        for name, fd in self._files.items():
            if self._seen[name] > _KEPT_BYTES:
                # The next write begins at the new end only because the file is open for appending.
                os.ftruncate(fd, 0)
                self._seen[name] = 0

    def close(self) -> None:
        """Release descriptors; the process must have ended or been killed."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        os.close(self._status)
        for fd in self._files.values():
            os.close(fd)


def memory_file(name: str) -> int:
    """Return a descriptor of a file in memory, open for appending."""
    import fcntl

    fd = os.memfd_create(f"fsdp_testing-{name}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _exit_from(report: str) -> Exit:
    if not report:
        return Exit(None, "unknown cause (the fork server has gone)")
    status, _, moment = report.partition(" ")
    code = int(status)
    if not os.WIFSIGNALED(code):
        return Exit(os.WEXITSTATUS(code), None, float(moment))
    number = os.WTERMSIG(code)
    try:
        return Exit(None, signal.Signals(number).name, float(moment))
    except ValueError:
        return Exit(None, f"signal {number}", float(moment))


def listening_socket(address: str = LOOPBACK) -> socket.socket:
    """Return a listening socket on a port that the kernel chose, so that no other process can take the port."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen(1024)
    return sock


def loopback() -> str:
    """Return the address at which processes of this machine reach one another: IPv4, or IPv6 if there is none.

    Raises:
        PoolBroken: There is neither.
    """
    problem: OSError | None = None
    for address in (LOOPBACK, "::1"):
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))  # nothing is sent
        except OSError as error:
            problem = error
        else:
            return address
    raise PoolBroken(
        f"world: expected a loopback address (127.0.0.1 or ::1), over which ranks talk, got none ({problem}). Bring the "
        "interface up (`ip link set lo up`, as root), or run outside the sandbox that took it away."
    )


def start_rank(
    server: ForkServer,
    boot: Bootstrap,
    ledger: tuple[int, AreaView],
    *,
    serves_store: bool = False,
    store: int | None = None,
) -> tuple[RankProcess, int]:
    """Fork a rank and tell it where it belongs; returns it with the port of its world's store, if that has one.

    Args:
        server: The fork server.
        boot: The rank's bootstrap.
        ledger: Descriptor of its world's ledger, and the rank's own area.
        serves_store: Whether the rank serves a store that others reach by network.
        store: The file of a private store.
    """
    with contextlib.ExitStack() as undo:
        more, port = {} if store is None else {"store": store}, boot.store_port
        if serves_store:
            listener = undo.enter_context(listening_socket(boot.store_host))
            more["listen"], port = listener.fileno(), listener.getsockname()[1]
        process = RankProcess(server, boot.rank, ledger, more)
    try:
        process.channel.send(replace(boot, store_port=port))
    except BaseException:
        process.kill()
        process.close()
        raise
    return process, port


def environment_for_ranks() -> dict[str, Any]:
    """Environment, path, directory and arguments of the controller, for a rank to adopt."""
    return {
        "environment": env.snapshot(),
        "sys_path": list(sys.path),
        "directory": directory(),
        "argv": list(sys.argv),
    }
