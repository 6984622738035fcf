"""What ranks do in tests of the pool, how it is run, and whether a process is gone."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.errors import HarnessError
from fsdp_testing.ranks.pool import PooledWorld
from fsdp_testing.ranks.pool.world import current_world


def total() -> float:
    value = torch.ones(4)
    dist.all_reduce(value)
    return float(value.sum())


def pid() -> int:
    return os.getpid()


def place() -> tuple[int, int, str]:
    world = current_world()
    return world.rank, world.size, world.device.type


def fail() -> None:
    raise ValueError("planted")


def child_ends(*, fails: bool) -> int:
    """Fork a child that comes out of the call, by an exception or not; return how it ended."""
    child = os.fork()
    if child == 0:
        if fails:
            fail()
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sees(name: str) -> tuple[str | None, str, list[str]]:
    return os.environ.get(name), os.getcwd(), sys.path[:1]


def scheduling() -> set[int]:
    """Policies of scheduling of this process's threads (Linux)."""
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def dies_later() -> None:
    threading.Timer(0.1, os._exit, (5,)).start()


def addresses() -> list[str]:
    """Addresses of every TCP socket of this process that listens."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":
                found.append(fields[1].partition(":")[0])
    return found


def nested() -> str:
    from fsdp_testing import run_ranks

    try:
        run_ranks(total)
    except HarnessError as error:
        return str(error)
    return "ran"


def run(world: PooledWorld, function: Callable[..., Any], *args: Any) -> list[Any]:
    try:
        outcome = world.execute(function, args)
    finally:
        world.release()
    assert outcome.ok, outcome.describe()
    return outcome.values


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    limit = time.monotonic() + seconds
    waiting = threading.Event()
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        waiting.wait(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def put_in_the_way(folder: str) -> None:
    """Put a file where a folder is."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).touch()


def process_settings() -> tuple[object, ...]:
    """What a process has from the one that started it: umask, priority, processors and limit of descriptors."""
    umask = os.umask(0o077)
    os.umask(umask)
    return (
        umask,
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
