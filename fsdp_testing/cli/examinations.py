"""Examinations of a machine that is to run ranks: one function for each part of it, each returns one symptom.

Nothing here changes the machine, and only the last one takes more than a moment. `doctor` prints the symptoms.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fsdp_testing.base import env
from fsdp_testing.base.documentation import folder
from fsdp_testing.judging.worlds import MEMORY_BYTES_PER_RANK, memory_available, usable_processors
from fsdp_testing.ranks.pool.controller import missing_system_calls
from fsdp_testing.ranks.pool.forkserver import COMMAND

MIB = 1 << 20
SUPPORTED_TORCH = ((2, 11), (2, 15))
SHARED_MEMORY_BYTES = 64 * MIB
OPEN_FILES = 1024
TRIAL_SECONDS = 30.0
SLOW_SECONDS = 10.0
# Variables that change what ranks do, and that are easily forgotten in a shell.
NOTABLE = (
    "FSDP_",
    "GLOO_",
    "NCCL_",
    "TORCH_DISTRIBUTED_",
    "TORCH_NCCL_",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
)


class Condition(Enum):
    """The state of an examined part of the machine."""

    GOOD = "good"
    ODD = "odd"  # works, but slower than you may expect, or with less room
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Symptom:
    """The answer to one examination; `remedy` is empty when there is nothing to do."""

    condition: Condition
    account: str
    remedy: str = ""


good = functools.partial(Symptom, Condition.GOOD)
odd = functools.partial(Symptom, Condition.ODD)
broken = functools.partial(Symptom, Condition.BROKEN)


def examine() -> Iterator[tuple[str, Symptom]]:
    """Yield what is examined and what was found, in the order in which a fault would explain the later ones.

    If the trial world works, nothing is broken: what looked broken is only odd.
    """
    symptoms = {examination: _symptom_of(examination) for examination in EXAMINATIONS}
    trial = symptoms.get(trial_world)
    works = trial is not None and trial.condition is not Condition.BROKEN
    for examination, symptom in symptoms.items():
        spared = works and symptom.condition is Condition.BROKEN
        account = f"{symptom.account}; ranks work anyway" if spared else symptom.account
        name = examination.__name__.replace("_", " ")
        yield name, odd(account, symptom.remedy) if spared else symptom


def _symptom_of(examination: Callable[[], Symptom]) -> Symptom:
    try:
        return examination()
    except Exception as error:  # noqa: BLE001  (whatever goes wrong while looking is itself the finding)
        first = next(iter(str(error).splitlines()), "")
        return broken(f"{type(error).__name__}: {first}", "Fix this first.")


def python() -> Symptom:
    """Interpreter and platform."""
    account = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    missing = missing_system_calls()
    if missing:
        account = f"{account} without {', '.join(missing)}"
        return broken(account, "Run tests on ranks on Linux; a container or WSL 2 is enough.")
    return good(account)


def torch() -> Symptom:
    """Torch, in a version that we support, with torch.distributed."""
    import torch as installed
    import torch.distributed as dist

    version = installed.__version__
    if not dist.is_available():
        return broken(f"{version} without torch.distributed", "Install a build that has it.")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED_TORCH
    if not low <= numbers <= high:
        account = f"{version}, supported are {low[0]}.{low[1]} to {high[0]}.{high[1]}"
        return broken(account, "Install a supported version.")
    return good(version)


def backends() -> Symptom:
    """Return which communication backends can run two ranks here."""
    from fsdp_testing.base.backends import backend_named, registered_backends

    reasons = {name: backend_named(name).unavailable(2) for name in registered_backends()}
    account = "; ".join(f"{name}: {reason}" if reason else name for name, reason in reasons.items())
    if reasons.get("gloo"):
        return broken(account, "Install a build of torch that has gloo.")
    return good(account)


def loopback() -> Symptom:
    """Listening and connecting on 127.0.0.1, at a port that the kernel chooses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5), server.accept()[0]:
            return good("127.0.0.1 accepts connections on kernel-chosen ports")


def host_name() -> Symptom:
    """The address of this host's own name: gloo asks for it when no interface is named."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        with socket.create_server((str(address), 0)):
            return good(f"{name} is {address}")
    except OSError as error:
        account = f"{name} does not resolve to this machine ({error})"
        return odd(account, "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo.")


def shared_memory() -> Symptom:
    """Room in /dev/shm, which NCCL and the workers of a DataLoader use; ranks do not need it."""
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK):
        account = f"{place} is not writable: NCCL and the workers of a DataLoader need it, ranks do not"
        return odd(account, "Mount a tmpfs there if you use these.")
    return _room(place, "In a container, start it with a larger --shm-size.")


def temporary_files() -> Symptom:
    """The temporary directory, and room in it."""
    place, wanted = Path(tempfile.gettempdir()), env.get("TMPDIR")
    if wanted and place != Path(wanted).absolute():
        return odd(
            f"TMPDIR={wanted} cannot be written to, {place} is used instead", "Make that directory, or unset TMPDIR."
        )
    return _room(place, "Make room, or point TMPDIR elsewhere.")


def _room(place: Path, remedy: str) -> Symptom:
    free = shutil.disk_usage(place).free
    account = f"{free // MIB} MiB free in {place}"
    return odd(account, remedy) if free < SHARED_MEMORY_BYTES else good(account)


def limits() -> Symptom:
    """Open files: each rank needs a few dozen, each connection between ranks two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    account = f"{soft} open files per process (at most {hard})"
    if 0 <= soft < OPEN_FILES:
        return odd(account, f"Raise it: ulimit -n {min(hard, 65536)}.")
    return good(account)


def processors() -> Symptom:
    """Processors that this process may use, and the threads that torch would start on them in every rank."""
    usable = usable_processors()
    quota = _cgroup_processors()
    threads = env.get("OMP_NUM_THREADS")
    account = f"{usable} usable" + (f", {quota:g} by quota" if quota else "")
    account += f"; OMP_NUM_THREADS={threads}" if threads else "; OMP_NUM_THREADS is not set"
    if usable < 2 or (quota and quota < 2):
        return odd(account, "Ranks take turns on one processor: allow longer timeouts.")
    return good(account)


def _cgroup_processors() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def memory() -> Symptom:
    """Return how many ranks fit in the memory that is free now."""
    free = memory_available()
    if free is None:
        return odd("unknown: there is no /proc/meminfo")
    ranks = free // MEMORY_BYTES_PER_RANK
    account = f"{free // MIB} MiB available, room for about {ranks} ranks"
    if ranks < 4:
        return odd(account, "Free some memory, or use small worlds.")
    return good(account)


def leftover_ranks() -> Symptom:
    """Fork servers and ranks of this user whose controller has ended, whichever process adopted them."""
    leftovers = sorted(_leftovers())
    if not leftovers:
        return good("none")
    account = "; ".join(f"{number}: {command}" for number, command in leftovers)
    numbers = " ".join(str(number) for number, _ in leftovers)
    return broken(account, f"End them (kill {numbers}) and report how they arose.")


# Ranks are forks of the fork server, with its command line: the third argument is the controller.
_FORK_SERVER = re.compile(re.escape(COMMAND) + r"\(\d+, \d+, (\d+)\)")


def _leftovers() -> Iterator[tuple[int, str]]:
    parents: dict[int, int] = {}
    controllers: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            made = _FORK_SERVER.search(command)
            if made is None or entry.stat().st_uid != os.getuid():
                continue
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            controllers[int(entry.name)] = int(made[1]), command[:120]
        except (OSError, ValueError, IndexError):
            continue  # it has ended since
    for number, (controller, command) in controllers.items():
        ancestor = parents[number]
        while ancestor in parents:
            ancestor = parents[ancestor]
        # An orphan's parent is process 1, or whichever ancestor asked to adopt orphans: never its controller.
        if ancestor != controller:
            yield number, command


def environment() -> Symptom:
    """Variables that change what ranks do."""
    launch = env.launched()  # raises if variables contradict one another, which reports them
    values = {name: value for name, value in sorted(env.snapshot().items()) if name.startswith(NOTABLE)}
    if launch is not None:
        return good(f"rank {launch.rank} of {launch.world_size} under {launch.launcher}")
    if values:
        account = ", ".join(f"{name}={value}" for name, value in values.items())
        return odd(account, "Unset what you did not mean to set.")
    return good("no variable affects ranks")


def packages() -> Symptom:
    """Numpy (torch warns without it), and the entry point of the plugin, which leads to us."""
    from importlib import metadata

    import numpy as np

    entries = [entry.value for entry in metadata.entry_points(group="pytest11") if entry.name == "fsdp_testing"]
    account = f"fsdp-testing {metadata.version('fsdp-testing')}, numpy {np.__version__}, {Path(sys.executable)}"
    account += f"; documentation in {folder()}" if folder() else "; without documentation"
    if len(entries) != 1:
        return broken(f"{account}; pytest11 entry points: {entries}", "Install it once.")
    return good(account)


def trial_world() -> Symptom:
    """Two ranks start, find each other, sum, and end; how long it took."""
    from fsdp_testing import run_ranks

    start = time.perf_counter()
    sums = run_ranks(rank_sum, size=2, backend="gloo", timeout=TRIAL_SECONDS)
    took = time.perf_counter() - start
    if sums != [3.0, 3.0]:
        return broken(f"two ranks added 1 and 2 and got {sums}", "Report this.")
    account = f"two ranks started and added their numbers in {took:.1f} s"
    if took > SLOW_SECONDS:
        return odd(account, "The machine is busy or slow: allow longer timeouts.")
    return good(account)


def rank_sum() -> float:
    """Return the sum of all ranks' numbers plus one. Collectives: one all-reduce on the world's group; every rank."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


EXAMINATIONS: tuple[Callable[[], Symptom], ...] = (
    python,
    packages,
    torch,
    backends,
    processors,
    memory,
    limits,
    shared_memory,
    temporary_files,
    loopback,
    host_name,
    environment,
    leftover_ranks,
    trial_world,
)
