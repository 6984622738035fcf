"""The loop of every search: jobs side by side, answers in one thread, and everything on disk however it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_testing.search.loop import Budget, search


class Worlds:
    """Worlds that are told to stop."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def interrupt(self) -> None:
        self.stopped.set()


class Numbers:
    """A source of so many numbers; the last ones come only once all others were taken in."""

    def __init__(self, count: int, last: int = 0) -> None:
        self.first = list(range(count - last))
        self.last = list(range(count - last, count))
        self.under_way = 0
        self.most = 0
        self.answers: list[int] = []
        self.threads: set[int] = set()
        self.saved: list[list[int]] = []

    def next_job(self) -> Callable[[], int] | None:
        if not self.first and not self.under_way:
            self.first, self.last = self.last, []
        if not self.first:
            return None
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        number = self.first.pop(0)
        return lambda: number

    def take(self, answer: int) -> None:
        self.under_way -= 1
        self.threads.add(threading.get_ident())
        self.answers.append(answer)

    def save(self) -> None:
        self.saved.append(list(self.answers))


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_job_is_taken_in_once_in_one_thread_and_saved_at_the_end(jobs: int):
    source = Numbers(20, last=5)
    search(source, Worlds(), jobs)  # type: ignore[arg-type]  # they run nothing
    assert sorted(source.answers) == list(range(20))
    assert sorted(source.answers[15:]) == list(range(15, 20)), "what waits for others was begun too early"
    assert source.threads == {threading.get_ident()}
    assert source.most == jobs
    assert source.saved[-1] == source.answers


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError])
def test_an_end_before_its_time_stops_the_ranks_and_leaves_what_was_taken_in(end: type[BaseException]):
    worlds = Worlds()

    class Interrupted(Numbers):
        def next_job(self) -> Callable[[], int] | None:
            job: Any = super().next_job()
            if job is not None and job() == 1:
                return lambda: int(worlds.stopped.wait(60)) + 100  # ends only once its ranks do
            return job

        def take(self, answer: int) -> None:
            super().take(answer)
            if answer == 3:
                raise end

    source = Interrupted(10)
    with pytest.raises(end):
        search(source, worlds, 2)  # type: ignore[arg-type]  # they run nothing
    assert source.saved[-1] == source.answers == [0, 2, 3]
    assert worlds.stopped.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdp-job")]


def test_a_budget_has_time_and_cases():
    now = [10.0]
    budget = Budget(4.0, 2, lambda: now[0])
    now[0] = 20.0
    budget.restart()
    assert (budget.spent, budget.enough, budget.time_is_up(), budget.left(3.0)) == (0.0, False, False, 3.0)
    now[0], budget.begun = 23.0, 2
    assert (budget.enough, budget.time_is_up(0.75), budget.time_is_up(), budget.left(3.0)) == (True, True, False, 1.0)
    now[0] = 30.0
    assert (budget.time_is_up(), budget.left(3.0)) == (True, 0.0)
    endless = Budget()
    endless.begun = 10**9
    assert not endless.enough
    assert not endless.time_is_up()
