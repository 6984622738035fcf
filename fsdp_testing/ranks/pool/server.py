"""The controller's end of the process that forks ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_testing.base import env
from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.pool import preload, zygote
from fsdp_testing.ranks.pool.channel import readable
from fsdp_testing.ranks.pool.forkserver import COMMAND, FAILED, FORK, READY, SUCCEED
from fsdp_testing.ranks.pool.zygote import ForkedServer, state_of

_READY_SECONDS = 120.0
_FORK_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_MOST_LOOKS = 6
#: This many modules are worth another process, and the tenth of a second to put its memory into large pages.
WORTH_A_SUCCESSOR = 20
_STOPPED = ("T", "t")
_PACKAGE = Path(__file__).parents[2]
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServer:
    """The controller's end of the process that forks ranks. Starts at once, is waited for at the first fork."""

    def __init__(
        self, modules: tuple[str, ...], preparations: tuple[tuple[str, str], ...] = (), *, run: str = ""
    ) -> None:
        """Start it.

        Args:
            modules: Imported at once.
            preparations: Called after the imports.
            run: Name of a pytest-xdist run, whose workers fork their servers from one process; empty for a server of its own.
        """
        self._lock = threading.Lock()
        self._ready = False
        self._broken = False
        self._successor: socket.socket | None = None
        self._retired: list[socket.socket] = []
        self._wanted: dict[str, None] = {}
        self._refused: set[str] = set()
        self._expected: list[str] = []
        self._owner = os.getpid()
        self._run = run
        # An empty entry means the current folder, and this process may change it before the fork server looks there.
        path = [entry or directory() for entry in sys.path]
        environment = env.snapshot()
        # numpy's BLAS starts its threads at import unless answer not to; a forked rank would wait for them for ever.
        environment.update(dict.fromkeys(_SINGLE_THREAD, "1"))
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in path if not _has_other_copy(entry))
        self._setup: dict[str, Any] = {
            "sys_path": path,
            "modules": list(modules),
            "preparations": list(preparations),
            "environment": environment,
            "sys_executable": sys.executable,
        }
        if run:
            self._setup |= {"directory": directory(), "inherited": zygote.inherited()}
        self._control, self._process = self._started(run)

    def _started(self, run: str) -> tuple[socket.socket, subprocess.Popen[bytes] | ForkedServer]:
        """Return this end of the control socket, and the process at the other one."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = _memory_file(json.dumps(self._setup))
        process: subprocess.Popen[bytes] | ForkedServer | None = None
        try:
            process = zygote.ask(run, theirs, setup, self._setup["environment"]) if run else None
            if process is None:
                # The last number lets readers of the command line see whether the controller still runs.
                command = f"{COMMAND}({theirs.fileno()}, {setup}, {os.getpid()})"
                process = subprocess.Popen(
                    # -P: with -c alone the current folder would come before the controller's path, and its modules with it.
                    [sys.executable, "-P", "-c", command],
                    pass_fds=[theirs.fileno(), setup],
                    env=self._setup["environment"],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in the terminal reaches the controller alone, which ends the ranks.
                    start_new_session=True,
                )
            # Who answers: the process itself, or later its successor.
            self._current = process.pid
        finally:
            theirs.close()
            os.close(setup)
        return mine, process

    @property
    def pid(self) -> int:
        """Process number of the first server; a successor is its child."""
        return self._process.pid

    def fork(self, fds: dict[str, int]) -> int:
        """Fork one rank with the descriptors `fds` (name -> number); returns its pid.

        Raises:
            PoolBroken: When the fork server did not start, has ended or cannot fork.
        """
        with self._lock:
            self._wait_ready()
            self._import_expected()
            self._welcome_successor()
            while True:
                try:
                    socket.send_fds(self._control, [FORK + json.dumps(list(fds)).encode()], list(fds.values()))
                    answer = self._answer(1024, _FORK_SECONDS)
                except OSError as error:
                    answer, why = b"", str(error)
                else:
                    why = "end of stream"
                if answer[:1] == FAILED:
                    raise PoolBroken(
                        f"fork server: expected a new rank, got {answer[1:].decode()}. This machine may be out of "
                        "processes, memory or descriptors; close what you do not need, or use smaller worlds."
                    )
                if answer:
                    return int(answer)
                if not self._retired or self._process.poll() is not None:
                    raise PoolBroken(self._lost(why))
                # The successor ended; its predecessor still runs.
                self._control.close()
                self._control = self._retired.pop()

    def _wait_ready(self) -> None:
        if self._ready:
            return
        try:
            message = self._answer_of_zygote() if isinstance(self._process, ForkedServer) else b""
            if not message:
                message = self._answer(4096, _READY_SECONDS)
        except OSError as error:
            raise PoolBroken(self._lost(str(error))) from error
        if not message.startswith(READY):
            raise PoolBroken(self._lost("it ended while importing"))
        answer = json.loads(message[1:])
        threads, self._current = answer["threads"], answer["pid"]
        if isinstance(self._process, ForkedServer):
            self._process.begin(self._current)
        if threads > 1:
            self._broken = True
            raise PoolBroken(
                f"fork server: expected one thread after the preload, got {threads}. A preloaded module started "
                "threads, which forked ranks would wait for; remove it from the preload list."
            )
        self._control.settimeout(_FORK_SECONDS)
        self._ready = True

    def _answer_of_zygote(self) -> bytes:
        """Return the first message of the zygote's fork; if the zygote refuses, has gone or is silent, start a new server."""
        try:
            message = self._answer(4096, zygote.PATIENCE)
        except TimeoutError:
            message = b""
            zygote.give_up(self._run)
        if not message:
            self._process.wait()
            self._control.close()
            self._control, self._process = self._started("")
        return message

    def _answer(self, size: int, seconds: float) -> bytes:
        """Return the next message of the server, empty at its end; resume a stopped server.

        Raises:
            OSError: It does not answer.
        """
        limit, looks = time.monotonic() + seconds, 0
        while not readable(self._control, min(_LOOK_SECONDS, limit - time.monotonic())):
            if state_of(self._current) in _STOPPED:
                looks += 1
                if looks > _MOST_LOOKS:
                    raise InterruptedError("none: it is stopped, and SIGCONT does not help")
                with contextlib.suppress(OSError):
                    os.kill(self._current, signal.SIGCONT)
            if time.monotonic() >= limit:
                raise TimeoutError("none in time")
        return self._control.recv(size)

    def import_ahead(self, reported: Iterable[str]) -> None:
        """Start a successor that imports the modules that ranks had to import; do not wait for it."""
        with self._lock:
            self._wanted.update(dict.fromkeys(preload.to_import_ahead(reported)))
            if not self._ready or self._successor is not None or len(self._wanted) < WORTH_A_SUCCESSOR:
                return
            self._begin_successor(self._wanted)

    def expect(self, modules: Iterable[str]) -> None:
        """Import `modules` before the next fork, which waits for it: otherwise all later ranks would import them."""
        with self._lock:
            self._expected += modules

    def _import_expected(self) -> None:
        if not self._expected:
            return
        self._await_successor(_READY_SECONDS)  # it will be a child of the successor that is already importing
        wanted, refused = dict.fromkeys([*self._wanted, *self._expected]), -1
        self._expected.clear()
        while len(self._refused) > refused:  # another attempt without the module that starts threads
            refused = len(self._refused)
            self._begin_successor(wanted)
            self._await_successor(_READY_SECONDS)

    def _await_successor(self, seconds: float) -> None:
        if self._successor is not None:
            readable(self._successor.fileno(), seconds)
            self._welcome_successor()

    def _begin_successor(self, wanted: Iterable[str]) -> None:
        modules = [name for name in wanted if name not in self._refused]
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [SUCCEED + json.dumps(modules).encode()], [theirs.fileno()])
            except OSError:
                mine.close()
                return
        mine.settimeout(_FORK_SECONDS)
        self._successor = mine

    def _welcome_successor(self) -> None:
        """Use the successor from now on, if it has finished its imports and can fork."""
        if self._successor is None or not readable(self._successor.fileno()):
            return
        successor, self._successor = self._successor, None
        answer: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            message = successor.recv(4096)
            answer = json.loads(message[1:]) if message.startswith(READY) else {}
        if "culprit" in answer:
            self._refused.add(answer["culprit"])
        else:
            self._wanted.clear()
        if answer.get("threads") != 1:
            successor.close()
            return
        # The predecessor stays: it is the parent of the ranks it forked, and only a parent learns of their ends.
        self._retired.append(self._control)
        self._control, self._current = successor, answer["pid"]

    def wait_for_successor(self, seconds: float) -> bool:
        """Wait until a successor has taken over, and return whether one has; for measurements."""
        with self._lock:
            self._await_successor(seconds)
            return bool(self._retired)

    def _lost(self, why: str) -> str:
        self._broken = True
        code = self._process.poll()
        state = "still running" if code is None else f"ended with {code}"
        return (
            f"fork server: expected an answer, got {why} (process {state}). "
            "Run `fsdp-verify doctor`, and check that `import torch` works in this environment."
        )

    @property
    def alive(self) -> bool:
        """True while the process runs and answers as expected; one that ended while importing, until `fork` has said so."""
        return not self._broken and (not self._ready or self._process.poll() is None)

    def close(self) -> None:
        """End the fork server, which kills every remaining rank."""
        if os.getpid() != self._owner:
            return
        # End of file is the order to end, and to kill every rank.
        for control in (self._successor, self._control, *self._retired):
            if control is not None:
                control.close()
        if state_of(self._process.pid) in _STOPPED:
            self._process.kill()  # it cannot read the order to end
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the zygote's child: only the zygote waits for it
                self._process.wait()


def directory() -> str:
    """Return the controller's directory; '/' when it has been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


def _has_other_copy(entry: str) -> bool:
    """Return whether a folder of the path holds this package, but not the one that runs here.

    pytest may have put a checkout in front when the installed package was imported already. The fork server must find that
    one too; once it has, the order of the path decides about everything else, as it does here.
    """
    folder = Path(entry, _PACKAGE.name)
    return folder.is_dir() and not folder.samefile(_PACKAGE)


def _memory_file(text: str) -> int:
    # Not an argument of the command: those are limited in length and public.
    descriptor = os.memfd_create("fsdp_testing-setup", os.MFD_CLOEXEC)
    with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(text)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
