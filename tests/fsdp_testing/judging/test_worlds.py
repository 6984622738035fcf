"""Judgements side by side: the same results in the same order for any number of jobs, and a clean end of an early one."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from fsdp_testing import run_conformance
from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging import worlds
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.worlds import Capacity, Shared, capacity, in_order
from fsdp_testing.ranks.pool import Pool

WAIT = 60.0  # of a test that fails; none that passes waits


def job_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fsdp-job")]


def test_two_go_on_at_once_and_come_out_in_order():
    meet = threading.Barrier(2)

    def task(place):
        return lambda: (meet.wait(WAIT), place)[1]

    assert list(in_order([task(place) for place in range(6)], 2, lambda: None)) == list(range(6))
    assert not job_threads()


def test_one_that_is_done_first_waits_for_its_turn():
    second = threading.Event()

    def first():
        assert second.wait(WAIT)
        return "first"

    assert list(in_order([first, lambda: second.set() or "second"], 2, lambda: None)) == ["first", "second"]


def test_one_job_stays_in_the_calling_thread():
    assert list(in_order([threading.current_thread] * 3, 1, lambda: None)) == [threading.current_thread()] * 3


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_task_that_raises_ends_those_under_way_and_begins_no_other(error):
    stop, both, begun = threading.Event(), threading.Barrier(2), []

    def raises():
        both.wait(WAIT)
        raise error

    def goes_on():
        both.wait(WAIT)
        begun.append("second")
        assert stop.wait(WAIT)

    def late():
        begun.append("late")
        assert stop.wait(WAIT)

    with pytest.raises(error):
        list(in_order([raises, goes_on, *[late] * 50], 2, stop.set))
    assert stop.is_set()
    assert len(begun) < 50, "what had not begun was called all the same"
    assert not job_threads()


def test_what_several_ask_for_is_made_once():
    shared: Shared[int] = Shared(8)
    made, asked = [], threading.Barrier(4)

    def make():
        made.append(1)
        return len(made)

    def ask():
        asked.wait(WAIT)
        return shared.get("key", make)

    assert list(in_order([ask] * 4, 4, lambda: None)) == [1] * 4
    assert len(made) == 1


def test_what_failed_or_is_not_to_be_kept_is_made_again_and_the_oldest_makes_room():
    shared: Shared[int] = Shared(2)
    with pytest.raises(ZeroDivisionError):
        shared.get("a", lambda: 1 // 0)
    assert shared.get("a", lambda: 1, keep=lambda _: False) == 1
    assert shared.get("a", lambda: 2) == 2
    assert shared.get("a", lambda: 3) == 2
    assert [shared.get(key, lambda: 4) for key in "bc"] == [4, 4]
    assert shared.get("a", lambda: 5) == 5


@pytest.mark.parametrize(
    ("ranks", "processors", "most", "jobs"),
    [(2, 1, 40, 1), (2, 2, 40, 2), (2, 8, 40, 8), (4, 8, 40, 4), (2, 8, 3, 3), (8, 2, 9, 2)],
)
def test_jobs_by_processors_and_room(ranks, processors, most, jobs):
    assert Capacity(ranks, processors, most, "").jobs(None) == jobs


def test_more_jobs_than_there_is_room_for_are_refused_with_the_limit(monkeypatch):
    monkeypatch.setattr(worlds, "memory_available", lambda: 13 * worlds.MEMORY_BYTES_PER_RANK)
    room = capacity(2)
    assert room.most == 2
    assert room.jobs(2) == 2
    with pytest.raises(InvalidArgument, match=r"at most 2 here \(5200 MiB are available.*6 ranks\), got 3. Give fewer"):
        room.jobs(3)


@pytest.fixture
def runner():
    pool = Pool()
    yield CaseRunner(pool)
    pool.close()


NAMES = ("torch-ddp", "faults_gradients:SumForMean", "toy:UNBROKEN")
CHECKS = ("training.learning_rate_changes", "training.gradients_are_means", "trace.order")


def without_times(results):
    return [
        replace(
            result,
            seconds=0.0,
            cases=tuple(replace(case, seconds=0.0) for case in result.cases),
            findings=tuple(replace(finding, detail="", shortest=None) for finding in result.findings),
        )
        for result in results
    ]


def test_results_are_the_same_with_any_number_of_jobs(runner):
    heard = {}

    class Listener:
        def __init__(self, jobs):
            self.events = heard.setdefault(jobs, [])

        def planned(self, total):
            self.events.append(total)

        def started(self, implementation, check):
            self.events.append((implementation, check))

        def finished(self, result):
            self.events.append((result.implementation, result.check, result.verdict))

    found = {
        jobs: run_conformance(*NAMES, checks=CHECKS, explain=0.0, runner=runner, jobs=jobs, listener=Listener(jobs))
        for jobs in (1, 3)
    }
    for one, other in zip(without_times(found[1].results), without_times(found[3].results), strict=True):
        assert one == other
    assert heard[1] == heard[3]
    assert {result.verdict for result in found[1].results} == {Verdict.PASS, Verdict.FAIL, Verdict.NOT_CLAIMED}
    assert sum(world.key.size == 2 for world in runner.pool.worlds()) > 1, "nothing went on side by side"


def test_ctrl_c_ends_the_ranks_under_way_and_the_runner_can_be_used_again(runner):
    class Impatient:
        def planned(self, total):
            pass

        def started(self, implementation, check):
            if implementation == "faults_process:HANGS":
                raise KeyboardInterrupt

        def finished(self, result):
            pass

    with pytest.raises(KeyboardInterrupt):
        run_conformance(
            "torch-ddp",
            "faults_process:HANGS",
            checks=("training.float32", "training.sgd_momentum"),
            runner=runner,
            jobs=4,
            listener=Impatient(),
        )
    assert not job_threads()
    assert not any(world.busy for world in runner.pool.worlds())
    (again,) = run_conformance("torch-ddp", checks=("training.float32",), runner=runner, jobs=2).results
    assert again.verdict is Verdict.PASS
