"""Runs jobs on worlds of one pool, for several threads at once, until somebody interrupts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from fsdp_testing.cases.records import WorldSpec
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.concurrency import in_order
from fsdp_testing.ranks.pool import Pool, WorldOutcome
from fsdp_testing.ranks.pool.preload import TRAINING
from fsdp_testing.ranks.pool.world_on_loan import PooledWorld

BATCHES_PER_WORLD = 100

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
                # While it is on loan: nobody else is lent a world that is about to leave.
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

    def interrupt(self) -> None:
        """End the ranks of jobs under way, and refuse more. For another thread to call."""
        with self._lock:
            self._interrupted = True
            for world in self._busy:
                world.kill_ranks()
