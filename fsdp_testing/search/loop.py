"""The loop of every search: a source gives batches of cases, threads have them judged, and the source takes in the results.

A source is used only in the caller's thread, so it needs no lock. Its jobs run in threads that only wait for their worlds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from fsdp_testing.judging.worlds import INTERRUPT_SECONDS, Worlds

_SAVE_SECONDS = 5.0

A = TypeVar("A")


class Source(Protocol[A]):
    """Where cases come from; every method is called from the thread of the loop."""

    def next_job(self) -> Callable[[], A] | None:
        """Return the next job; None if there is none until another result was taken in."""

    def take(self, answer: A) -> None:
        """Take in what a job returned."""

    def save(self) -> None:
        """Save the current results; called every few seconds, and at the end, also after an error."""


class Budget:
    """The limits of a search.

    Args:
        seconds: Time at most; None for no limit.
        cases: How many cases to begin at most; None for no limit.
        clock: Seconds; only differences count.
    """

    def __init__(
        self, seconds: float | None = None, cases: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._cases = cases
        self._clock = clock
        self._start = clock()
        self.begun = 0

    def restart(self) -> None:
        self._start = self._clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._start

    def left(self, most: float) -> float:
        """Return the seconds that are left, and no more than `most`."""
        return most if self._seconds is None else min(max(0.0, self._seconds - self.spent), most)

    def time_is_up(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is over."""
        return self._seconds is not None and self.spent >= share * self._seconds

    @property
    def enough(self) -> bool:
        """Return whether the allowed number of cases was begun."""
        return self._cases is not None and self.begun >= self._cases


def search(source: Source[A], worlds: Worlds, jobs: int) -> None:
    """Keep up to `jobs` jobs of a source running until it has no more and all are done.

    On an interrupt the ranks of running jobs are ended, all threads end, and the source is saved. Cases of these jobs have no
    verdict; the next search runs them.

    Args:
        source: Gives jobs.
        worlds: The worlds in which they run.
        jobs: How many at a time, each in a thread of its own.
    """
    saved = time.monotonic()
    running: set[Future[A]] = set()
    executor = ThreadPoolExecutor(jobs, thread_name_prefix="fsdp-job")
    try:
        while True:
            while len(running) < jobs and (job := source.next_job()) is not None:
                running.add(executor.submit(job))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                source.take(future.result())
            if time.monotonic() - saved > _SAVE_SECONDS:
                source.save()
                saved = time.monotonic()
    except BaseException:
        # A thread ends only after its ranks, and may just have started on another world: repeat until no thread is left.
        worlds.interrupt()
        while wait(running, timeout=INTERRUPT_SECONDS).not_done:
            worlds.interrupt()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        source.save()
