"""Every way in which a rank can end a call, as a program that does it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.supervision import GRACE_SECONDS
from fsdp_testing.ranks.pool.world import current_world


def mine() -> bool:
    return current_world().rank == 1


def raise_late_on_one(seconds: float) -> None:
    """Rank 0 computes for longer than the grace period, and raises what rank 1 raised."""
    end = time.monotonic() + (0.0 if mine() else seconds)
    while time.monotonic() < end:
        pass
    raise ValueError("planted")


def raise_on_one() -> None:
    if mine():
        raise ValueError("planted\nsecond line")
    dist.all_reduce(torch.ones(4))


def raise_on_all() -> None:
    raise KeyError("same")


def raise_differently() -> None:
    if mine():
        threading.Event().wait(0.05)
        raise ValueError("right")
    raise KeyError("left")


def killed() -> None:
    if mine():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def killed_while_others_return() -> None:
    if mine():
        os.kill(os.getpid(), signal.SIGKILL)


class _Death:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_when_collected() -> None:
    if mine():
        _Death()


def exits() -> None:
    if mine():
        os._exit(7)


def exits_quietly() -> None:
    if mine():
        os._exit(0)


def system_exit() -> None:
    if mine():
        sys.exit(0)


def interrupted() -> None:
    if mine():
        raise KeyboardInterrupt


def segfaults() -> None:
    if mine():
        ctypes.string_at(0)
    dist.barrier()


def hangs_in_collective() -> None:
    if mine():
        while True:
            threading.Event().wait(0.05)
    dist.all_reduce(torch.ones(4))


def hangs_in_python() -> None:
    while True:
        pass


def ends_when_stacks_are_taken() -> None:
    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)  # to which the rank says "Fatal Python error: Segmentation fault"

    if mine():
        print("before", file=sys.stderr)
        signal.signal(signal.SIGUSR1, end)
    while True:
        pass


def hangs_with_the_gil() -> None:
    if mine():
        ctypes.PyDLL(None).sleep(600)
    dist.barrier()


def stops_itself() -> None:
    if mine():
        os.kill(os.getpid(), signal.SIGSTOP)


def returns_early() -> None:
    dist.all_reduce(torch.ones(4))
    if not mine():
        dist.all_reduce(torch.ones(4))


def skips_one_call() -> None:
    for step in range(3):
        if not (mine() and step == 1):
            dist.all_reduce(torch.ones(step + 1))


def leaves_a_collective_open() -> None:
    dist.all_reduce(torch.ones(4))
    if mine():
        dist.all_reduce(torch.ones(4), async_op=True)


def marks_itself_failed() -> Any:
    if mine():
        return Failed({"why": "planted"})
    dist.all_reduce(torch.ones(4))
    return None


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_without_text() -> None:
    raise BadText


def recurses() -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    deeper(0)


def generates() -> Iterator[int]:
    yield 1


def returns_a_lock() -> Any:
    return threading.Lock()


class ReducesBadly:
    def __reduce__(self) -> Any:
        raise BadText


def returns_what_raises() -> Any:
    return ReducesBadly()


class LoadsBadly:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    if "fsdp_testing.ranks.pool.worker" not in sys.modules or current_or_none() is None:
        raise OSError("only in the controller")


def current_or_none() -> Any:
    try:
        return current_world()
    except Exception:
        return None


def returns_what_cannot_be_read() -> Any:
    return LoadsBadly()


def gloo_times_out() -> None:
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=1))
    if mine():
        while True:
            threading.Event().wait(0.05)
    dist.all_reduce(torch.ones(4), group=group)


def closes_descriptors() -> None:
    if mine():
        os.closerange(3, 256)


def dies_slowly() -> None:
    """The channel is gone at once, the process after the grace that a peer's error starts: a core dump takes as long."""
    if not mine():
        raise ValueError("planted")
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as found:
            if found.family == socket.AF_UNIX:
                os.close(int(entry))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 3 * GRACE_SECONDS)
    threading.Event().wait(600)


def writes_into_the_channel() -> None:
    if mine():
        for entry in os.listdir("/proc/self/fd"):
            name = os.readlink(f"/proc/self/fd/{entry}") if os.path.exists(f"/proc/self/fd/{entry}") else ""
            if name.startswith("socket:") and int(entry) > 2:
                try:
                    os.write(int(entry), (3).to_bytes(8, "little") + b"abc")
                except OSError:
                    continue
        threading.Event().wait(600)


# function: fates of rank 0 and 1, what the leading sentence says, seconds allowed (None: the deadline of 2 s plus one)
