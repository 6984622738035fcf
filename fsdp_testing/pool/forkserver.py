"""Where do ranks come from? From one process that has imported and never computed.

A process that has run one parallel operation holds threads which do not survive a fork, so pytest's own process is
never forked. This one imports torch, then, whenever nobody asks for a rank, the modules that torch was seen to import
lazily (one at a time, so that a request waits for one import at most), and forks. It is single-threaded by rule.

Requests come over one inherited SEQPACKET socket; its end of file means that the controller is gone, whatever killed
it, and every rank is killed.
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
from collections import deque
from typing import NoReturn

FORK = b"F"
PRELOAD = b"P"
READY = b"R"
_FDS = 16
_MESSAGE_BYTES = 1 << 18


def main(control_fd: int, setup: str) -> NoReturn:
    """Serve until the controller goes. `setup` is JSON: sys_path, modules to import before the first fork."""
    settings = json.loads(setup)
    sys.path[:] = settings["sys_path"]
    die_with_parent(settings["controller_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _ForkServer(socket.socket(fileno=control_fd))
    server.import_now(settings["modules"])
    server.serve()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the socket's end must do)."""
    prctl = _prctl()
    if prctl is not None:
        prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent ends, so that what a test left behind can be found."""
    prctl = _prctl()
    if prctl is not None:
        prctl(36, 1, 0, 0, 0)


def _prctl() -> object:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    return ctypes.CDLL(None, use_errno=True).prctl


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._status_pipes: dict[int, int] = {}
        self._waiting_imports: deque[str] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def import_now(self, modules: list[str]) -> None:
        """Import before serving; a module that fails is left to the rank that needs it, which will say so."""
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

    def serve(self) -> NoReturn:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()
        gc.disable()
        threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
        # A controller that has gone already is found out by the first read.
        with contextlib.suppress(OSError):
            self._control.send(READY + json.dumps({"pid": os.getpid(), "threads": threads}).encode())
        while True:
            patience = 0 if self._waiting_imports else None
            ready, _, _ = select.select([self._control, self._wake_read], [], [], patience)
            if self._wake_read in ready:
                self._reap()
            if self._control in ready:
                self._answer()
            elif self._waiting_imports and not ready:
                self._import_next()

    def _import_next(self) -> None:
        module = self._waiting_imports.popleft()
        if module not in sys.modules:
            self.import_now([module])
        if not self._waiting_imports:
            gc.freeze()

    def _answer(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._end()
        if data[:1] == PRELOAD:
            self._waiting_imports.extend(json.loads(data[1:]))
        elif data[:1] == FORK:
            self._fork(json.loads(data[1:]), fds)

    def _fork(self, names: list[str], fds: list[int]) -> None:
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
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        status_fd = by_name.pop("status")
        self._status_pipes[pid] = status_fd
        for fd in by_name.values():
            os.close(fd)
        self._control.send(str(pid).encode())

    def _become_rank(self, fds: dict[str, int], server_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(server_pid)
        adopt_orphans()
        self._control.close()
        for fd in (self._wake_read, self._wake_write, fds.pop("status"), *self._status_pipes.values()):
            os.close(fd)
        gc.enable()
        from fsdp_testing.pool import worker

        worker.main(fds)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            pipe = self._status_pipes.pop(pid, None)
            if pipe is not None:
                with contextlib.suppress(OSError):
                    os.write(pipe, str(status).encode())
                os.close(pipe)

    def _end(self) -> NoReturn:
        for pid in self._status_pipes:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)
