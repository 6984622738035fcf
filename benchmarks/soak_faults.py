"""Random faults on 2 and 3 ranks, each with the verdict and the rank that must be blamed, and the test after it.

The n-th fault follows from the seed and n alone: what goes wrong, on which rank, after how many collectives.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_testing import current_world
from fsdp_testing.base.printable import printable
from fsdp_testing.ranks.pool import Pool, WorldOutcome, cause
from fsdp_testing.ranks.pool.forkserver import COMMAND

DEADLINE_S = 2.0
GRACE_S = 2.0
PATIENT = "sleep 86399"
"""What a rank starts and leaves: its command is looked for afterwards."""


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Unsendable(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())


def raising(error: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def fault() -> NoReturn:
        raise error()

    return fault


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def deep() -> None:
    deep()


def busy() -> None:
    while True:
        pass


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    time.sleep(86400)


def out_of_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))
    try:
        bytearray(1 << 32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def full_disk() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        Path(f"/tmp/soak-{os.getpid()}").write_bytes(bytes(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        Path(f"/tmp/soak-{os.getpid()}").unlink(missing_ok=True)


def talkative() -> None:
    sys.stdout.write("x" * (1 << 22))
    raise ValueError("after four million letters")


def leaves_a_child_and_dies() -> None:
    subprocess.Popen(PATIENT.split(), start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_destructor() -> NoReturn:
    class Late:
        def __del__(self) -> None:
            os._exit(9)

    late = Late()
    del late
    raise AssertionError("not reached")


ENDS: dict[str, Callable[[], Any]] = {
    **{
        f"raises {error.__name__}": raising(lambda error=error: error("planted"))
        for error in (ValueError, AssertionError, KeyError, OSError, RuntimeError, MemoryError, StopIteration, BaseException)
    },
    "raises KeyboardInterrupt": raising(KeyboardInterrupt),
    "raises GeneratorExit": raising(GeneratorExit),
    "raises a group": raising(lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")])),
    "raises what cannot be printed": raising(Unprintable),
    "raises what cannot be sent": raising(Unsendable),
    "raises a text of 3 MB": raising(lambda: ValueError("é" * (3 << 20))),
    "raises odd letters": raising(lambda: ValueError("\x1b[2J\x00\ud800\u202e")),
    "recursion": deep,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(7)": lambda: os._exit(7),
    "os.abort": os.abort,
    "exits in a destructor": in_a_destructor,
    "memory limit": out_of_memory,
    "full disk": full_disk,
    "4 MB of output": talkative,
    "leaves a child and dies": leaves_a_child_and_dies,
    **{
        signal.Signals(number).name: signalled(number)
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE,
                       signal.SIGILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU, signal.SIGSYS)
    },
}  # fmt: skip
HANGS: dict[str, Callable[[], Any]] = {
    "sleeps": lambda: time.sleep(86400),
    "busy": busy,
    "locked": locked,
    "deaf": deaf,
    "stopped": signalled(signal.SIGSTOP),
    "waits for a child": lambda: subprocess.run(PATIENT.split(), check=False),
    "waits for a pipe": lambda: os.read(os.pipe()[0], 1),
    "waits for a thread": lambda: threading.Event().wait(),
}
DISAGREES: dict[str, Callable[[torch.Tensor], Any]] = {
    "other operation": lambda value: dist.all_reduce(value, op=dist.ReduceOp.MAX),
    "other dtype": lambda value: dist.all_reduce(value.double()),
    "other shape": lambda value: dist.all_reduce(value[:3].clone()),
    "other collective": lambda value: dist.broadcast(value, 0),
    "barrier": lambda value: dist.barrier(),
    "gathers": lambda value: dist.all_gather([value.clone() for _ in range(dist.get_world_size())], value),
}
LEAVES: dict[str, Callable[[], Any]] = {
    "environment": lambda: os.environ.__setitem__("SOAK", "1"),
    "folder": lambda: os.chdir("/"),
    "default dtype": lambda: torch.set_default_dtype(torch.float16),
    "handler": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "file": lambda: os.open(__file__, os.O_RDONLY),
    "thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "child": lambda: subprocess.Popen(PATIENT.split()),
    "niceness": lambda: os.nice(1),
}
KINDS = {"ends": ENDS, "hangs": HANGS, "disagrees": DISAGREES, "leaves": LEAVES, "returns early": {"returns": None}}


def planted(sort: str, name: str, culprit: int, before: int) -> float:
    """Sum a few times, then have the fault on `culprit` while the others sum on. Collectives: all-reduces; every rank."""
    value = torch.ones(4)
    for _ in range(before):
        dist.all_reduce(value)
    if current_world().rank == culprit:
        if sort == "returns early":
            return 0.0
        if sort == "disagrees":
            DISAGREES[name](value)
        else:
            KINDS[sort][name]()
    else:
        dist.all_reduce(value)
    if sort == "leaves" and current_world().rank == culprit:
        dist.all_reduce(value)
    return 0.0


def healthy() -> list[float]:
    """Return the sum of all ranks' ones. Collectives: one all-reduce; every rank."""
    value = torch.ones(4, dtype=torch.float64)
    dist.all_reduce(value)
    return value.tolist()


def slow(culprit: int, naps: list[float]) -> float:
    """Sum as often as there are naps, which one rank takes before each. Collectives: so many all-reduces; every rank."""
    value = torch.zeros(1, dtype=torch.float64)
    for nap in naps:
        if current_world().rank == culprit:
            time.sleep(nap)
        value += 1
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def blamed(outcome: WorldOutcome) -> tuple[int, ...]:
    """Return the ranks that the account blames; of ranks that disagree nobody is to blame."""
    match outcome.diagnosis:
        case cause.EndedBadly(ranks=ranks) | cause.NotJoined(ranks=ranks):
            return tuple(ranks)
        case cause.Hung(ranks=ranks, behind=behind):
            return tuple(behind or ranks)
        case cause.Stuck(gone=gone):
            return (gone,)
        case cause.GaveUp(missing=missing):
            return (missing.rank,)
    return ()


@dataclass(frozen=True)
class Planted:
    """One fault: of which sort, on which rank of how many, after how many collectives."""

    sort: str
    name: str
    culprit: int
    size: int
    before: int


def drawn(rng: random.Random) -> Planted:
    size = rng.choice((2, 3))
    sort = rng.choice([sort for sort, kinds in KINDS.items() for _ in range(len(kinds))])
    name = rng.choice(sorted(KINDS[sort]))
    culprit, before = rng.randrange(size), rng.choice((0, 1, 5))
    return Planted(sort, name, culprit, size, before)


def wrong(pool: Pool, fault: Planted) -> str:
    """Plant a fault; return what is wrong with the verdict on it, or with the test after it; empty if nothing is."""
    with pool.lend(fault.size) as world:
        start = time.monotonic()
        outcome = world.execute(planted, (fault.sort, fault.name, fault.culprit, fault.before), timeout=DEADLINE_S)
        took = time.monotonic() - start
    problems = list(complaints(outcome, fault.sort, fault.culprit))
    if took > DEADLINE_S + GRACE_S:
        problems.append(f"took {took:.1f} s")
    with pool.lend(fault.size) as world:
        after = world.execute(healthy, timeout=60.0)
    if not after.ok or after.values != [[float(fault.size)] * 4] * fault.size:
        problems.append(f"the test after it: {after.cause or after.values}")
    where = f"on rank {fault.culprit} of {fault.size} after {fault.before}"
    return f"{where}: {'; '.join(problems)}" if problems else ""


def raised(error: BaseException) -> str:
    """Return what was raised, and where, in a line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {printable(str(error))[:160]}"


def complaints(outcome: WorldOutcome, sort: str, culprit: int) -> Iterator[str]:
    if sort == "leaves":
        dirty = [rank.rank for rank in outcome.ranks if rank.dirt]
        if not outcome.ok:
            yield f"failed: {outcome.cause}"
        if dirty != [culprit]:
            yield f"leaked state on ranks {dirty}"
        return
    if outcome.ok:
        yield "passed"
    elif sort == "disagrees":
        if not isinstance(outcome.diagnosis, (cause.Refused, cause.Diverged)):
            yield f"not told to disagree: {outcome.cause}"
    elif blamed(outcome) != (culprit,):
        yield f"blames {blamed(outcome)}: {outcome.cause[:300]}"


def orphans(pool: Pool) -> list[str]:
    """Return the processes that belong to no world and stay: ranks without one, and what ranks had started."""
    limit = time.monotonic() + GRACE_S
    while (lost := _without_a_world(pool)) and time.monotonic() < limit:
        time.sleep(0.05)  # what was killed a moment ago is still there
    return lost


def _without_a_world(pool: Pool) -> list[str]:
    ours = {pid for world in pool.worlds() for pid in world.pids}
    lost = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            rank = COMMAND in command and f", {os.getpid()})" in command and int(parent) != os.getpid()
            successor = not _is_rank(int(entry.name))
            if state != "Z" and ((rank and int(entry.name) not in ours and not successor) or command == PATIENT):
                lost.append(f"{entry.name}: {command[:60]}")
    return lost


def _is_rank(pid: int) -> bool:
    """A rank leads a process group of its own; a successor of the fork server does not."""
    return os.getpgid(pid) == pid


def held() -> dict[str, int]:
    """Return what this process holds, and how many files in shared memory nobody does."""
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": len(left_in_shared_memory()),
        "KiB": int(status.partition("VmRSS:")[2].split()[0]),
    }


def left_in_shared_memory() -> set[str]:
    """Return the files in shared memory that no process holds, for a while: those of others that run beside this are no leak."""
    limit = time.monotonic() + GRACE_S
    left = _held_by_nobody()
    while left and time.monotonic() < limit:
        time.sleep(0.05)  # of a process that has just ended; what watches over it removes them
        left &= _held_by_nobody()
    return left


def _held_by_nobody() -> set[str]:
    left = {str(path) for path in Path("/dev/shm").iterdir()}
    for process in Path("/proc").glob("[0-9]*") if left else ():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            left -= {path for path in left if path in maps}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    left.discard(str(descriptor.readlink()))
    return left
