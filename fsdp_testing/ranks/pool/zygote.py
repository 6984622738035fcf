"""One process that has imported torch, from which the fork servers of all workers of pytest-xdist are forked.

Otherwise each worker would import torch a second time: nearly two seconds of processor time, and its memory. The first worker
that needs ranks binds a socket named after the run and starts this process with it. Every worker connects to the socket, waits in
its queue while torch is imported, and sends what its fork server needs: the server's end of the control socket, and the setup.
From then on that fork belongs to the worker. This process ends with the last connected worker, so it cannot outlive the run. A
worker that is refused, or whose request is lost, starts its own fork server.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from fsdp_testing.base import env
from fsdp_testing.ranks.pool import forkserver
from fsdp_testing.ranks.pool.hygiene_leftovers import thread_count

COMMAND = "from fsdp_testing.ranks.pool.zygote import main; main"
PATIENCE = 60.0
"""Seconds that a worker waits for its server, and the zygote for its imports and for its first worker."""
_REQUEST_SECONDS = 10.0
# Variables that differ between workers, and that no import reads.
_OF_WORKERS = ("PYTEST_", "COV_CORE_")


class ForkedServer:
    """A worker's end of a fork server that the zygote makes for it; replaces a `Popen`.

    Attributes:
        pid: Its process number; 0 until it has said so.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = 0
        self._connection = connection
        self._watched: int | None = None

    def begin(self, pid: int) -> None:
        """Watch the process, which has reported that it is ready, from now on."""
        self.pid = pid
        with contextlib.suppress(AttributeError, OSError):
            self._watched = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while it runs or has not begun; only its parent learns how it ended."""
        return None if not self.pid or not self._ended(0.0) else -1

    def _ended(self, seconds: float) -> bool:
        if self._watched is not None:
            return bool(select.select([self._watched], [], [], seconds)[0])
        return state_of(self.pid) in ("", "Z")

    def kill(self) -> None:
        if self.pid and self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = _REQUEST_SECONDS) -> None:
        """Wait for its end, and leave the zygote.

        Raises:
            subprocess.TimeoutExpired: It did not end.
        """
        limit = time.monotonic() + seconds
        while self.pid and not self._ended(min(0.1, seconds)):
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("fork server", seconds)
        self._connection.close()
        if self._watched is not None:
            os.close(self._watched)
            self._watched = None
        self.pid = 0


_silent: set[str] = set()


def give_up(run: str) -> None:
    """Stop asking the zygote of a run, which does not answer, for example because it is stopped."""
    _silent.add(run)


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return ""


def ask(run: str, control: socket.socket, setup: int, environment: dict[str, str]) -> ForkedServer | None:
    """Ask the zygote of a run for a fork server; None if there is no zygote and none can be started.

    Args:
        run: Name of the run.
        control: The server's end of the socket that requests come over.
        setup: A file with JSON, as for `forkserver.main`, with the variables of the worker.
        environment: Environment of the zygote, if this worker starts it.
    """
    if run in _silent:
        return None
    name = f"\0fsdp-testing-{os.getuid()}-{run}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(name)  # by one worker alone
        listening.listen(1024)
        _start(listening, setup, environment)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(name)
        if _peer(connection)[1] != os.getuid():
            raise PermissionError("somebody else's")
        socket.send_fds(connection, [b"fork"], [control.fileno(), setup])
    except OSError:
        connection.close()
        return None
    return ForkedServer(connection)


def inherited() -> dict[str, Any]:
    """Return what a process inherits from its parent besides the environment."""
    umask = os.umask(0o077)
    os.umask(umask)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    }


def _inherit(worker: dict[str, Any]) -> None:
    """Take it over, as if that worker had started this process.

    Raises:
        OSError, ValueError: This process may not.
    """
    own = inherited()
    os.umask(worker["umask"])
    if worker["nice"] != own["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, worker["nice"])
    if worker["processors"] != own["processors"]:
        os.sched_setaffinity(0, worker["processors"])
    for name, limits in worker["limits"].items():
        if tuple(limits) != own["limits"][name]:
            resource.setrlimit(getattr(resource, name), tuple(limits))


def _start(listening: socket.socket, setup: int, environment: dict[str, str]) -> None:
    command = f"{COMMAND}({listening.fileno()}, {setup}, {os.getpid()})"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", command],
        pass_fds=[listening.fileno(), setup],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # it ends with the last worker, and this one does not wait for it


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def main(listening_fd: int, setup_fd: int, starter_pid: int) -> NoReturn:
    """Import, then fork a server for each worker that asks, until the last one has gone.

    Args:
        listening_fd: The socket that workers connect to.
        setup_fd: A file with JSON of the worker that started this process; read, and left as it is.
        starter_pid: That worker, which may end before it asks for anything.
    """
    gc.disable()  # as the fork server does
    starter = forkserver.watch_process(starter_pid)
    settings = forkserver.read_setup(setup_fd)
    sys.path[:] = settings["sys_path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap)
    # The kernel's alarm: a hanging import may never return to Python.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(PATIENCE))
    for module in settings["modules"]:
        forkserver.import_ahead(module)
    signal.alarm(0)
    if thread_count() > 1:
        os._exit(1)  # each worker's own server reports the module to blame
    _Zygote(socket.socket(fileno=listening_fd), settings["sys_executable"], starter).serve()


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _Zygote:
    def __init__(self, listening: socket.socket, executable: str, starter: int | None) -> None:
        self._listening = listening
        self._starter = starter
        self._executable = executable
        self._environment = env.snapshot()
        # Each worker's connection, and a descriptor that becomes readable when its process ends.
        self._workers: dict[socket.socket, int | None] = {}

    def serve(self) -> NoReturn:
        while True:
            gone = [watched for watched in self._workers.values() if watched is not None]
            watched = [self._listening.fileno(), *(worker.fileno() for worker in self._workers), *gone]
            if not self._workers and self._starter is not None:
                watched.append(self._starter)
            ready, _, _ = select.select(watched, [], [], None if self._workers else PATIENCE)
            for worker, process in list(self._workers.items()):
                if worker.fileno() in ready or process in ready:
                    self._leave(worker)
            if self._listening.fileno() in ready:
                self._welcome()
            if not self._workers:
                os._exit(0)

    def _leave(self, worker: socket.socket) -> None:
        process = self._workers.pop(worker)
        worker.close()
        if process is not None:
            os.close(process)

    def _welcome(self) -> None:
        worker, _ = self._listening.accept()
        pid, user = _peer(worker)
        fds: list[int] = []
        with contextlib.suppress(OSError):
            worker.settimeout(_REQUEST_SECONDS)
            if user == os.getuid():
                _, fds, _, _ = socket.recv_fds(worker, 16, 2)
        if len(fds) != 2:
            worker.close()
            return
        process = None
        with contextlib.suppress(AttributeError, OSError):
            process = os.pidfd_open(pid)
        if os.fork() == 0:
            try:
                self._become_server(fds, process)
            finally:
                os._exit(1)
        self._workers[worker] = process
        for fd in fds:
            os.close(fd)

    def _become_server(self, fds: list[int], process: int | None) -> None:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listening.close()
        if self._starter is not None:
            os.close(self._starter)
        for worker in self._workers:
            worker.close()
        for other in self._workers.values():
            if other is not None:
                os.close(other)
        settings = forkserver.read_setup(fds[1])
        if settings["sys_executable"] != self._executable or self._differs(settings["environment"]):
            return
        env.restore(settings["environment"])
        try:
            os.chdir(settings["directory"])
            _inherit(settings["inherited"])
        except (OSError, ValueError):
            return
        signal.alarm(
            int(PATIENCE)
        )  # no process watches it until it serves: a hanging import must not outlive the worker
        forkserver.begin(fds[0], settings, process)

    def _differs(self, environment: dict[str, str]) -> bool:
        """Whether a variable has changed since the imports of this process, which may have read it."""
        known = [{name: value for name, value in each.items() if not name.startswith(_OF_WORKERS)}
                 for each in (self._environment, environment)]  # fmt: skip
        return known[0] != known[1]
