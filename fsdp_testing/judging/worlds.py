"""Runs jobs on worlds of one pool, for several threads at once, until somebody interrupts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from fsdp_testing.cases.records import WorldSpec
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.concurrency import INTERRUPT_SECONDS, in_order
from fsdp_testing.ranks.pool import Pool, WorldOutcome
from fsdp_testing.ranks.pool.preload import TRAINING
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld

BATCHES_PER_WORLD = 100
_SAVE_SECONDS = 5.0

A = TypeVar("A")


class Worlds:
    """Lends worlds for one job at a time, in each of several threads.

    Attributes:
        pool: Where worlds come from.
        lost: How many jobs ended with a world that had to be replaced.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lost = 0
        self._lock = threading.Lock()
        self._busy: set[PooledWorld] = set()
        self._batches: WeakKeyDictionary[PooledWorld, int] = WeakKeyDictionary()
        self._interrupted = False
        pool.expect(*TRAINING)

    def execute(
        self,
        spec: WorldSpec,
        job: Callable[..., Any],
        arguments: tuple[Any, ...],
        name: str,
        *,
        timeout: float,
        lasting: frozenset[str] = frozenset(),
    ) -> WorldOutcome:
        """Call `job(*arguments)` on every rank of a world, as `PooledWorld.execute` does.

        Raises:
            PoolBroken: The pool has no world, or what runs here was interrupted.
        """
        if self._interrupted:
            raise PoolBroken("the run was interrupted")
        with self.pool.lend(spec.size, backend=spec.backend) as world:
            try:
                # Under the lock that `interrupt` takes: a world is either killed there, or never begun.
                with self._lock:
                    if self._interrupted:
                        raise PoolBroken("the run was interrupted")
                    self._busy.add(world)
                outcome = world.execute(job, arguments, timeout=timeout, name=name, lasting=lasting)
                with self._lock:
                    self.lost += not outcome.ok
                if lasting:
                    self._limit_batches(world)
                return outcome
            finally:
                # Before the world is given back: `interrupt` must not end ranks that are lent to somebody else by then.
                with self._lock:
                    self._busy.discard(world)

    def _limit_batches(self, world: PooledWorld) -> None:
        """End a world after many batches: what implementations keep in memory for good must not add up."""
        with self._lock:
            self._batches[world] = self._batches.get(world, 0) + 1
            enough = self._batches[world] >= BATCHES_PER_WORLD
        # Outside the lock: ranks may take a moment to leave.
        if enough:
            world.leave()

    def side_by_side(self, tasks: Sequence[Callable[[], A]], jobs: int) -> Generator[A]:
        """Yield what the tasks return, in their order, with up to `jobs` under way, each on worlds of its own.

        If the iteration ends early, the ranks of tasks under way are ended, and what they ask for later is refused.
        """
        try:
            yield from in_order(tasks, jobs, self.interrupt)
        finally:
            if jobs > 1:  # one job is not interrupted from here, and may itself be a part of one of several
                self._interrupted = False

    def drive(
        self,
        next_job: Callable[[], Callable[[], A] | None],
        take: Callable[[A], None],
        jobs: int,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep up to `jobs` jobs under way until there is none any more and all are done: the loop of every search.

        If this is interrupted, the ranks of jobs under way are ended, and no thread is left.

        Args:
            next_job: Gives the next job; None while there is none, until an answer was taken.
            take: Called with each answer, in this thread.
            jobs: How many at a time, each in a thread of its own.
            save: Called every few seconds after an answer, and at the end, however that comes.
        """
        saved = time.monotonic()
        running: set[Future[A]] = set()
        executor = ThreadPoolExecutor(jobs, thread_name_prefix="fsdp-job")
        try:
            while True:
                while len(running) < jobs and (job := next_job()) is not None:
                    running.add(executor.submit(job))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                # In this thread: what `take` changes needs no lock.
                for future in done:
                    take(future.result())
                if time.monotonic() - saved > _SAVE_SECONDS:
                    save()
                    saved = time.monotonic()
        except BaseException:
            self.interrupt()
            while wait(running, timeout=INTERRUPT_SECONDS).not_done:
                self.interrupt()  # a thread may just have begun on another world
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
            save()

    def interrupt(self) -> None:
        """End the ranks of jobs under way, and refuse more. For another thread to call."""
        with self._lock:
            self._interrupted = True
            for world in self._busy:
                world.kill_ranks()
