"""The process that ranks are forked from: it has imported torch and never computed.

A process that has run one parallel operation holds threads which do not survive a fork, so pytest's own process is
never forked. This one imports torch and forks. It is single-threaded by rule.

A successor imports the modules that ranks had to import themselves: it is a fork of this process, and no request waits for
it. When it is done and still single-threaded, the controller asks it for ranks instead. If an import started threads, it
names the module and is dropped.

Requests come over one inherited SEQPACKET socket. Its end of file, or the end of the controller's process (a forked child
of the controller may hold a copy of the socket), means that every rank must be killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from fsdp_testing.ranks.pool import large_pages
from fsdp_testing.ranks.pool.hygiene_leftovers import children, thread_count

COMMAND = "from fsdp_testing.ranks.pool.forkserver import main; main"
FORK = b"F"
SUCCEED = b"S"
READY = b"R"
FAILED = b"E"
_FDS = 16
_MESSAGE_BYTES = 1 << 18
_END_SECONDS = 2.0


def main(control_fd: int, setup_fd: int, controller_pid: int) -> NoReturn:
    """Serve until the controller goes.

    Args:
        control_fd: The socket that requests come over.
        setup_fd: A file with JSON: sys_path, modules to import, preparations to call.
        controller_pid: The process that started this one.
    """
    gc.disable()  # imported objects stay: collecting them again and again takes a tenth of torch's import time
    begin(control_fd, read_setup(setup_fd), watch_process(controller_pid))


def read_setup(setup_fd: int) -> dict[str, Any]:
    """Return the contents of the controller's file, from its beginning, and close it."""
    with os.fdopen(setup_fd, encoding="utf-8") as stream:
        stream.seek(0)
        settings: dict[str, Any] = json.load(stream)
    return settings


def begin(control_fd: int, settings: dict[str, Any], controller: int | None) -> NoReturn:
    """Import and prepare what the controller wants, then serve; `controller` is a descriptor that becomes readable at its end."""
    sys.path[:] = settings["sys_path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _ServerLoop(socket.socket(fileno=control_fd), controller)
    for module in settings["modules"]:
        import_ahead(module)
    for target, argument in settings["preparations"]:
        module, _, function = target.partition(":")
        # Likewise: if this fails, each rank makes it itself.
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), function)(argument)
    signal.alarm(0)
    server.serve()


def watch_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process `pid`, the parent, ends; None if the kernel has no such call.

    Not PR_SET_PDEATHSIG: that fires when the *thread* of the parent that made this process ends, and a pool may be first
    used in any thread.
    """
    descriptor: int | None
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # no such call, or no such process any more
        descriptor = None
    if os.getppid() != pid:
        os._exit(1)
    return descriptor


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, a single-threaded one (Linux)."""
    _prctl(1, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent ends, so that processes leaked by a test can be found."""
    _prctl(36, 1)


def run_until_it_waits() -> None:
    """Ask the kernel not to interrupt this process for another rank that a message has woken (Linux).

    With more ranks than processors each collective would otherwise switch between them several times. Threads and child
    processes inherit it. A policy that the user has chosen stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _ServerLoop:
    def __init__(self, control: socket.socket, controller: int | None) -> None:
        self._control = control
        self._controller = controller
        # Ranks' pipes by pid; None for a successor.
        self._children: dict[int, int | None] = {}
        self._modules: frozenset[str] = frozenset()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self, more: dict[str, Any] | None = None) -> NoReturn:
        """Say that imports are done, then answer requests for ever."""
        adopt_orphans()
        # This writes its pages once here instead of once in every rank. If it fails here, each rank does it itself.
        with contextlib.suppress(Exception):
            from fsdp_testing.ranks.ledger import interception
            from fsdp_testing.ranks.pool import hygiene

            interception.install()
            hygiene.remember()
        self._modules = frozenset(sys.modules)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Must exist though it does nothing: Python writes to the descriptor only for signals that it handles.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Freeze live objects: later collections would write to each, and so copy its page, in every rank.
        gc.collect()
        gc.freeze()
        large_pages.collapse()
        self._send(READY + json.dumps({"pid": os.getpid(), "threads": thread_count(), **(more or {})}).encode())
        watched = [self._control.fileno(), self._wake_read]
        if self._controller is not None:
            watched.append(self._controller)
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._controller in ready:
                self._end()
            if self._wake_read in ready:
                self._reap()
            if self._control.fileno() in ready:
                self._answer()

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError:
            self._end()

    def _answer(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._end()
        try:
            message = json.loads(data[1:])
            pid = self._fork(message, fds) if data[:1] == FORK else self._fork_successor(message, fds)
        except (OSError, ValueError) as error:
            # No process or descriptor left: report it to the requester, while other worlds go on.
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._send(FAILED + f"{type(error).__name__}: {error}".encode())
        else:
            if data[:1] == FORK:
                self._send(str(pid).encode())

    def _fork(self, names: list[str], fds: list[int]) -> int:
        by_name = dict(zip(names, fds, strict=True))
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._become_rank(by_name, server_pid)
                status = 0
            finally:
                os._exit(status)
        # Here and in the child: whichever runs first, the group exists before it is signalled.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        # Stays open: the end of the rank is written there.
        self._children[pid] = by_name.pop("status")
        for fd in by_name.values():
            os.close(fd)
        return pid

    def _become_rank(self, fds: dict[str, int], server_pid: int) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._leave_server(server_pid)
        adopt_orphans()
        run_until_it_waits()
        # Held by the fork server alone, so that its end is the end of the file.
        os.close(fds.pop("status"))
        if self._controller is not None:
            os.close(self._controller)
        gc.enable()
        from fsdp_testing.ranks.pool import worker

        worker.main(fds, self._modules)

    def _leave_server(self, server_pid: int) -> None:
        """Release, in a child, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(server_pid)
        self._control.close()
        for fd in (self._wake_read, self._wake_write, *self._children.values()):
            if fd is not None:
                os.close(fd)

    def _fork_successor(self, modules: list[str], fds: list[int]) -> int:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._leave_server(server_pid)
                _succeed(socket.socket(fileno=fds[0]), self._controller, modules)
            finally:
                os._exit(1)
        self._children[pid] = None
        os.close(fds[0])
        return pid

    def _reap(self) -> None:
        # Emptied first: a rank that ends while others are reaped wakes this loop again.
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._children:
                # While the rank is a zombie its number is not reused: no other process group is hit.
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            pipe = self._children.pop(pid, None)
            # Before the controller learns of the end: processes that the rank leaked must not disturb the next call.
            self._kill_orphans()
            if pipe is not None:
                with contextlib.suppress(OSError):
                    os.write(pipe, f"{status} {time.monotonic()}".encode())
                os.close(pipe)

    def _kill_orphans(self) -> None:
        """End processes that ended ranks leaked in other sessions: they have become this process's children."""
        for pid in children():
            if pid not in self._children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self) -> NoReturn:
        signal.set_wakeup_fd(-1)
        for pid in self._children:
            # By group and by number: a successor has no group of its own.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + _END_SECONDS
        while time.monotonic() < limit:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            self._children.pop(pid, None)
            self._kill_orphans()
            if pid == 0:
                time.sleep(0.002)
        os._exit(0)


def _succeed(control: socket.socket, controller: int | None, modules: list[str]) -> NoReturn:
    server = _ServerLoop(control, controller)
    for module in modules:
        if module in sys.modules:
            continue
        with _unheard():
            import_ahead(module)
        if thread_count() > 1:
            server.serve({"culprit": module})
    server.serve()


def import_ahead(module: str) -> None:
    """Import a module; if that fails, the rank that needs the module will report it."""
    with contextlib.suppress(Exception):
        importlib.import_module(module)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Silence the warnings of imports that the user did not ask for.

    It redirects the descriptor: log handlers that modules make keep the stream object, and warning filters that they add stay.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
