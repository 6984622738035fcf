"""Runs independent judgements in parallel on worlds of one pool, until interrupted, and yields them in order.

Each thread only waits: ranks and the oracle compute in separate processes. The best number depends on the processors, and on
the memory and processes that the ranks of that many worlds take.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from fsdp_testing.cases.records import WorldSpec
from fsdp_testing.errors import InvalidArgument, PoolBroken
from fsdp_testing.oracle.kept_groups import LASTING, KeptGroups, keep
from fsdp_testing.ranks.pool import Pool, WorldOutcome
from fsdp_testing.ranks.pool.controller import MOST_PROCESSES
from fsdp_testing.ranks.pool.preload import TRAINING
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld

MEMORY_BYTES_PER_RANK = 400 << 20
_TASKS_OF_A_RANK = 16
"""Threads of gloo, of its store and of autograd, and the rank itself."""
INTERRUPT_SECONDS = 0.5
_PIDS = Path("/sys/fs/cgroup/pids.max")

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many jobs this machine has room for.

    Attributes:
        ranks: Ranks of the largest world of a job.
        processors: Processors that this process may use.
        most: Jobs whose ranks fit into memory and the number of processes; at least 1.
        reason: The reason for that limit.
    """

    ranks: int
    processors: int
    most: int
    reason: str

    def jobs(self, count: int | None, usual: int | None = None) -> int:
        """Return how many jobs to run; if none are asked for, `usual`, or what keeps the processors busy.

        One job alone leaves processors idle: ranks wait for one another, then for the oracle. From two on they are busy.

        Raises:
            InvalidArgument: More are asked for than there is room for, or none.
        """
        if count is None:
            wanted = max(2, 2 * self.processors // self.ranks) if self.processors > 1 else 1
            return min(usual or wanted, self.most)
        if count < 1:
            raise InvalidArgument(f"jobs: expected a number of at least 1, got {count}. Give 1 or more.")
        if count > self.most:
            raise InvalidArgument(f"jobs: expected at most {self.most} here ({self.reason}), got {count}. Give fewer.")
        return count

    def said(self, jobs: int) -> str:
        """The number of jobs, and the reason for it."""
        return f"{jobs} ({self.processors} processors, room for {self.most})"


def capacity(largest: int, processors: int | None = None) -> Capacity:
    """Return how many jobs have room here, each with a world of `largest` ranks, one a rank larger, and the oracle.

    Args:
        largest: Ranks of the largest world.
        processors: Processors of the ranks, where hosts share the work; each host is assumed to have as much room as this one.
    """
    ranks = 2 * largest + 2
    limits = {f"{MOST_PROCESSES} ranks are the most that one process may have": MOST_PROCESSES}
    free = memory_available()
    if free is not None:
        limits[f"{free >> 20} MiB are available, a rank takes up to {MEMORY_BYTES_PER_RANK >> 20}"] = (
            free // MEMORY_BYTES_PER_RANK
        )
    with suppress(OSError, ValueError):  # "max", or no such limit
        allowed = int(_PIDS.read_text(encoding="ascii"))
        limits[f"{allowed} processes and threads are allowed, a rank has about {_TASKS_OF_A_RANK}"] = (
            allowed // _TASKS_OF_A_RANK
        )
    # The narrowest of all limits is the one that a user is told.
    reason = min(limits, key=lambda name: limits[name])
    return Capacity(
        largest,
        processors or usable_processors(),
        max(1, limits[reason] // ranks),
        f"{reason}; a job takes up to {ranks} ranks",
    )


def usable_processors() -> int:
    """Return how many processors this process may use, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_available() -> int | None:
    """Return the bytes that new processes may take; None where the system does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return None


def in_order(tasks: Sequence[Callable[[], A]], jobs: int, interrupt: Callable[[], object]) -> Generator[A]:
    """Yield what the tasks return, in their order, with up to `jobs` under way at a time.

    Args:
        tasks: Each is called once; with one job in the calling thread, else in a thread of several.
        jobs: How many at a time.
        interrupt: Called if the iteration ends early (Ctrl-C, a task that raised): makes tasks under way end soon. Tasks that
            have not begun are not called then, and no thread is left.
    """
    # In the calling thread: Ctrl-C ends the task itself, and no thread needs a signal.
    if jobs == 1:
        yield from (task() for task in tasks)
        return
    executor = ThreadPoolExecutor(jobs, thread_name_prefix="fsdp-job")
    futures = [executor.submit(task) for task in tasks]
    try:
        for future in futures:
            yield future.result()
    except BaseException:
        # Start nothing new, then end running tasks; wait last.
        executor.shutdown(wait=False, cancel_futures=True)
        interrupt()
        begun = [future for future in futures if not future.cancelled()]  # `wait` would wait for the others for ever
        while wait(begun, timeout=INTERRUPT_SECONDS).not_done:
            interrupt()  # a thread may just have begun on another world
        raise
    finally:
        executor.shutdown(wait=True)


class Same:
    """Equal only for the same object, even if the object cannot be compared."""

    def __init__(self, whom: object) -> None:
        self._whom = whom

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._whom is self._whom

    def __hash__(self) -> int:
        return id(self._whom)


class Shared(Generic[A]):
    """Results that several jobs may ask for: the first one to ask makes it, others wait for that one.

    Args:
        room: Number of results remembered, the most recently used.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._results: OrderedDict[Hashable, Future[A]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], A], *, keep: Callable[[A], bool] = lambda _: True) -> A:
        """Return the result for `key`; made now if it is not known, and remembered if `keep` says so."""
        with self._lock:
            known = self._results.get(key)
            future: Future[A] = Future() if known is None else known
            # Entered before it is made: concurrent callers wait for this one.
            self._results[key] = future
            self._results.move_to_end(key)
            if len(self._results) > self._room:
                self._results.popitem(last=False)
        if known is not None:
            return known.result()
        # Outside the lock: callers of other keys must not wait for this.
        try:
            made = make()
        except BaseException as error:
            # Removed before waiters are woken: later callers try again.
            self._forget(key, future)
            future.set_exception(error)
            raise
        if not keep(made):
            self._forget(key, future)
        future.set_result(made)
        return made

    def _forget(self, key: Hashable, future: Future[A]) -> None:
        with self._lock:
            if self._results.get(key) is future:
                del self._results[key]


BATCHES_PER_WORLD = 100


class Worlds:
    """Lends worlds for one job at a time, in each of several threads.

    Attributes:
        pool: The pool that lends worlds.
        lost: How many jobs ended with a world that had to be replaced.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lost = 0
        self._lock = threading.Lock()
        self._busy: set[PooledWorld] = set()
        self._batches: WeakKeyDictionary[PooledWorld, int] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[PooledWorld, set[KeptGroups]] = WeakKeyDictionary()
        self._interrupted = False
        pool.expect(*TRAINING)

    def execute(
        self,
        needed: WorldSpec | KeptGroups,
        job: Callable[..., Any],
        arguments: tuple[Any, ...],
        name: str,
        *,
        timeout: float,
        lasting: frozenset[str] = frozenset(),
    ) -> WorldOutcome:
        """Call `job(*arguments)` on every rank of such a world, as `PooledWorld.execute` does.

        Raises:
            PoolBroken: The pool has no world, or the run was interrupted.
        """
        if self._interrupted:
            raise PoolBroken("the run was interrupted")
        spec = needed.world if isinstance(needed, KeptGroups) else needed
        with self.pool.lend(spec.size, backend=spec.backend) as world:
            try:
                # Under the lock that `interrupt` takes: a world is either killed there, or never begun.
                with self._lock:
                    if self._interrupted:
                        raise PoolBroken("the run was interrupted")
                    self._busy.add(world)
                outcome = self._keep(needed, world, timeout, name) if isinstance(needed, KeptGroups) else None
                if outcome is None:
                    outcome = world.execute(job, arguments, timeout=timeout, name=name, lasting=lasting)
                with self._lock:
                    self.lost += not outcome.ok
                # While it is on loan: no other thread borrows a world that is about to end.
                if lasting:
                    self._limit_batches(world)
                return outcome
            finally:
                # Before the world is given back: `interrupt` must not end ranks that another thread has borrowed by then.
                with self._lock:
                    self._busy.discard(world)

    def _keep(self, needed: KeptGroups, world: PooledWorld, timeout: float, name: str) -> WorldOutcome | None:
        """Have the ranks make groups that stay; return the outcome only if that failed."""
        there = self._groups.setdefault(world, set())
        if not needed.any or needed in there:
            return None
        outcome = world.execute(keep, (needed,), timeout=timeout, name=f"groups of {name}", lasting=LASTING)
        there.add(needed)
        return None if outcome.ok else outcome

    def _limit_batches(self, world: PooledWorld) -> None:
        """End a world after many batches: memory that implementations leak must not add up."""
        with self._lock:
            self._batches[world] = self._batches.get(world, 0) + 1
            enough = self._batches[world] >= BATCHES_PER_WORLD
        # Outside the lock: ranks may take a moment to leave.
        if enough:
            world.leave()

    def side_by_side(self, tasks: Sequence[Callable[[], A]], jobs: int) -> Generator[A]:
        """Yield what the tasks return, in their order, with up to `jobs` under way, each on worlds of its own.

        If the iteration ends early, the ranks of running tasks are ended, and their later requests are refused.
        """
        try:
            yield from in_order(tasks, jobs, self.interrupt)
        finally:
            if jobs > 1:  # a single job is not interrupted from here, and may itself be part of one of several jobs
                self._interrupted = False

    def interrupt(self) -> None:
        """End the ranks of running jobs, and refuse more. Called from another thread."""
        with self._lock:
            self._interrupted = True
            for world in self._busy:
                world.kill_ranks()
