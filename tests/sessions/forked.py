"""Pythons that tests start, forked from a process that has imported torch instead of importing it themselves.

A session of pytest in a new process costs three to four seconds of processor time before its first test, nearly all for torch:
it is imported in pytest, and again in its fork server. Both are forked here, from a process that has imported pytest, or from
its child that has torch too. Neither has imported anything of this project, nor computed; each fork imports the project as a
new process does, and ends as one does. It differs from a new process in this:

- All forks share one hash seed, and one import of pytest, torch and numpy. PYTHONHASHSEED, PYTHONWARNINGS, OMP_*, TORCH_* and
  whatever else Python or a library reads when it starts have no effect in `environment`: they are as this process had them.
- A fork server writes to the standard output and error of these tests, not to those of its session.

So a test of any of these, and of how a process starts, needs new processes: `run_folder` of tests/acceptance, the tests of
the pool, and `test_only_what_failed_last_and_how_to_debug_it` of test_outside.py, whose second session reads a file of the first.

Run as a script it is that process: `forked.py NAME LIFELINE` serves as NAME, until nobody holds the other end of LIFELINE.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SERVER = "from fsdp_testing.ranks.pool.forkserver import main"
WITH_TORCH = "-torch"
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_MESSAGE_BYTES = 1 << 17
_START_SECONDS = 120.0


@cache
def shared() -> Zygote:
    """Return the one of this process, which ends with it."""
    made = Zygote()
    atexit.register(made.close)
    return made


class Done(NamedTuple):
    """How a process ended."""

    returncode: int
    stdout: str
    stderr: str


class Zygote:
    """The process that others are forked from; it starts at once and ends with this object or with its process."""

    def __init__(self) -> None:
        self._name = f"\0fsdp-testing-sessions-{os.getpid()}-{secrets.token_hex(8)}"
        ours, theirs = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", *_SINGLE_THREAD)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._name[1:], str(ours)],
            env=environment | dict.fromkeys(_SINGLE_THREAD, "1"),
            pass_fds=[ours],
            stdin=subprocess.DEVNULL,
        )
        os.close(ours)
        self._lifeline = theirs

    def close(self) -> None:
        """End both processes."""
        os.close(self._lifeline)
        self._process.wait(60.0)

    def run(
        self,
        folder: Path,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        torch: bool = True,
        merged: bool = False,
        timeout: float = 900.0,
    ) -> Done:
        """Run `python` with these words, which begin with -m or -c, and wait for its end.

        Args:
            folder: Where it runs.
            words: Of the command, after `python`.
            environment: All of it.
            torch: Whether torch is imported already.
            merged: Whether its errors stand in the standard output.
            timeout: So many seconds it may take.

        Raises:
            subprocess.TimeoutExpired: It did not end.
        """
        request = {"folder": str(folder), "words": list(words), "environment": dict(environment), "zygote": self._name}
        with _file() as out, _file() as error:
            files = [out.fileno(), (out if merged else error).fileno()]
            with _asked(self._name + WITH_TORCH * torch, request, files) as connection:
                process = _Forked(connection, words)
                try:
                    code = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
            out.seek(0)
            error.seek(0)
            return Done(code, out.read(), error.read())


def _file() -> Any:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _asked(name: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> socket.socket:
    """Send a request, once somebody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limit = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection.connect(name)
            break
        except ConnectionRefusedError:  # its imports are under way
            if time.monotonic() > limit:
                raise
            select.select([], [], [], 0.05)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
    socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
    return connection


class _Forked:
    """A forked process for the one who asked for it, in the place of a `Popen`."""

    def __init__(self, connection: socket.socket, words: Sequence[str]) -> None:
        self._connection = connection
        self._words = list(words)
        self._lock = threading.Lock()
        self._code: int | None = None
        self.pid = self._answer(_START_SECONDS)

    def _answer(self, seconds: float | None) -> int:
        if not select.select([self._connection], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(self._words, seconds or 0.0)
        answer = self._connection.recv(64)
        if not answer:
            raise EOFError("the process that others are forked from has ended, cannot fork or cannot read the request")
        return int(answer)

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It did not end.
        """
        with self._lock:
            if self._code is None:
                self._code = self._answer(seconds)
                self._connection.close()
            return self._code

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Requests:
    """Forks what is asked for, tells each its process number, and how it ended."""

    def __init__(self, name: str, lifeline: int) -> None:
        self._lifeline = lifeline
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(name)
        self._running: dict[int, socket.socket] = {}
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._wake = wake

    def serve(self) -> Callable[[], int]:
        """Return only in a fork: what it is to do, whose return is its exit code."""
        self._listening.listen()
        while True:
            ready, _, _ = select.select([self._listening, self._lifeline, self._woken], [], [])
            if self._lifeline in ready:
                os._exit(0)
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._listening in ready:
                work = self._fork()
                if work is not None:
                    return work

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                connection = self._running.pop(pid, None)
                if connection is not None:
                    with contextlib.suppress(OSError), connection:
                        connection.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _fork(self) -> Callable[[], int] | None:
        """Return what a fork is to do; None in this process, which serves on whatever becomes of one request."""
        connection, _ = self._listening.accept()
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
            request = json.loads(message)
            gc.freeze()
            pid = os.fork()
        except (OSError, ValueError):  # the one who asked has been killed, asks too much, or no process is left
            connection.close()
            pid = None
        if pid == 0:
            self._close_in_fork()
            connection.close()
            work = _python if "words" in request else _server
            return lambda: work(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is not None:
            self._running[pid] = connection
            with contextlib.suppress(OSError):
                connection.send(str(pid).encode())
        return None

    def _close_in_fork(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listening.close()
        for descriptor in (self._lifeline, self._woken, self._wake):
            os.close(descriptor)
        for other in self._running.values():
            other.close()


def _python(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Be `python -m MODULE` or `python -c CODE`, in a folder and an environment, with this standard output and error."""
    _become(request["environment"], request["folder"])
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    pythonpath = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [request["folder"], *pythonpath]
    subprocess.Popen = _popen_of(request["zygote"])
    gc.enable()
    kind, what, *words = request["words"]
    sys.argv = [kind, *words]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
    return 0


def _popen_of(zygote: str) -> type[subprocess.Popen[bytes]]:
    class Popen(subprocess.Popen[bytes]):
        """The fork server of a pool is forked as well; any other process starts as ever."""

        def __new__(cls, args: Any = (), *more: Any, **given: Any) -> Any:
            if not (isinstance(args, list) and any(str(word).startswith(SERVER) for word in args)):
                return super().__new__(cls)
            request = {"pid": os.getpid(), "folder": str(Path.cwd()), "environment": given["env"]}
            return _Forked(_asked(zygote + WITH_TORCH, request, given["pass_fds"]), args)

    return Popen


def _server(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Be the fork server of a pool."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    controller = os.pidfd_open(request["pid"])
    _become(request["environment"], request["folder"])
    control, setup = descriptors
    with os.fdopen(os.dup(setup), encoding="utf-8") as stream:
        sys.path[:] = json.load(stream)["sys_path"]
    from fsdp_testing.ranks.pool import forkserver

    forkserver.begin(control, forkserver.read_setup(setup), controller)


def _become(environment: Mapping[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by `os.fork`
        sys.modules["numpy.random"].seed()


def main(name: str, lifeline: int) -> int:
    """Serve in two processes; what a fork of either is to do is done here, at the bottom of its stack."""
    gc.disable()
    del sys.path[0]  # this script's folder
    importlib.import_module("pytest")
    torch = os.fork() == 0
    for module in ("torch", "torch.distributed", "torch.distributed.device_mesh", "numpy.random") if torch else ():
        importlib.import_module(module)
    return _Requests("\0" + name + WITH_TORCH * torch, lifeline).serve()()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
