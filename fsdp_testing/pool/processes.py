"""How does the controller start, watch and end the processes of a world?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from fsdp_testing import env
from fsdp_testing.errors import PoolBroken
from fsdp_testing.pool import preload
from fsdp_testing.pool.channel import Channel
from fsdp_testing.pool.forkserver import FORK, PRELOAD, READY

_READY_SECONDS = 120.0
_SEND_SECONDS = 20.0
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServer:
    """The controller's end of the process that forks ranks. Starts at once, is waited for at the first fork."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self.threads = 1
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = mine
        setup = json.dumps({"sys_path": sys.path, "modules": list(modules), "controller_pid": os.getpid()})
        command = f"from fsdp_testing.pool.forkserver import main; main({theirs.fileno()}, {setup!r})"
        environment = env.snapshot()
        # numpy's BLAS starts its threads at import unless told not to; a forked rank would wait for them for ever.
        environment.update(dict.fromkeys(_SINGLE_THREAD, "1"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._owner = os.getpid()

    def fork(self, fds: dict[str, int]) -> int:
        """Fork one rank with the descriptors `fds` (name -> number); returns its pid.

        Raises:
            PoolBroken: when the fork server did not start or has ended.
        """
        with self._lock:
            self._wait_ready()
            try:
                socket.send_fds(self._control, [FORK + json.dumps(list(fds)).encode()], list(fds.values()))
                answer = self._control.recv(64)
            except OSError as error:
                raise PoolBroken(self._lost(str(error))) from error
            if not answer:
                raise PoolBroken(self._lost("end of stream"))
            return int(answer)

    def _wait_ready(self) -> None:
        if self._ready:
            return
        self._control.settimeout(_READY_SECONDS)
        try:
            message = self._control.recv(4096)
        except OSError as error:
            raise PoolBroken(self._lost(str(error))) from error
        if not message.startswith(READY):
            raise PoolBroken(self._lost("it ended while importing"))
        self.threads = json.loads(message[1:])["threads"]
        if self.threads > 1:
            raise PoolBroken(
                f"fork server: expected one thread after the preload, got {self.threads}. A preloaded module started "
                "threads, which forked ranks would wait for; remove it from the preload list."
            )
        recorded = preload.recorded_modules()
        if recorded:
            self._control.send(PRELOAD + json.dumps(recorded).encode())
        self._ready = True

    def _lost(self, why: str) -> str:
        code = self._process.poll()
        state = "still running" if code is None else f"ended with {code}"
        return (
            f"fork server: expected an answer, got {why} (process {state}). "
            "Run `fsdp-verify doctor`, and check that `import torch` works in this environment."
        )

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the fork server; every rank that is still there is killed by it."""
        if os.getpid() != self._owner:
            return
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended: one of exit code and signal name."""

    code: int | None
    signal_name: str | None


class RankProcess:
    """One rank's process: its channel, output files and exit status."""

    def __init__(self, server: ForkServer, rank: int, ledger: int, listen: int | None) -> None:
        self.rank = rank
        mine, theirs = socket.socketpair()
        self.channel = Channel(mine, send_timeout=_SEND_SECONDS)
        self.status_fd, status_write = os.pipe()
        os.set_blocking(self.status_fd, False)
        self._files = {name: _memory_file(name) for name in ("stdout", "stderr", "stacks")}
        self._seen = dict.fromkeys(self._files, 0)
        fds = {"conn": theirs.fileno(), "ledger": ledger, "status": status_write, **self._files}
        if listen is not None:
            fds["listen"] = listen
        try:
            self.pid = server.fork(fds)
        finally:
            theirs.close()
            os.close(status_write)
        self.exit: Exit | None = None
        self._closed = False

    def read_exit(self) -> Exit | None:
        """Exit status, once the fork server has told it."""
        if self.exit is None and not self._closed:
            with contextlib.suppress(BlockingIOError):
                text = os.read(self.status_fd, 64).decode()
                self.exit = _exit_from(int(text)) if text else Exit(None, "unknown cause (the fork server has gone)")
        return self.exit

    def request_stacks(self) -> None:
        """Ask for the Python stacks of all threads; answered in C, without the GIL."""
        self.signal(signal.SIGUSR1)

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone, unless it has ended."""
        if self.read_exit() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank and every process it left in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def take_output(self, name: str) -> str:
        """Text written since the last call to `stdout`, `stderr` or `stacks`."""
        fd = self._files[name]
        size = os.fstat(fd).st_size
        start = self._seen[name]
        if size <= start:
            return ""
        data = os.pread(fd, size - start, start)
        self._seen[name] = start + len(data)
        return data.decode("utf-8", "replace")

    def close(self) -> None:
        """Release descriptors; the process must have ended or been killed."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        os.close(self.status_fd)
        for fd in self._files.values():
            os.close(fd)


def _memory_file(name: str) -> int:
    import fcntl

    fd = os.memfd_create(f"fsdp_testing-{name}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _exit_from(status: int) -> Exit:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return Exit(None, signal.Signals(number).name)
        except ValueError:
            return Exit(None, f"signal {number}")
    return Exit(os.WEXITSTATUS(status), None)


def listening_socket() -> socket.socket:
    """A loopback socket on a port the kernel chose, already listening: nobody can take the port from under us."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    return sock


def environment_for_ranks() -> dict[str, Any]:
    """Environment, path, directory and arguments of the controller, for a rank to adopt."""
    return {
        "environment": env.snapshot(),
        "sys_path": list(sys.path),
        "directory": os.getcwd(),
        "argv": list(sys.argv),
    }
