"""Worlds are lent, kept and replaced, and ranks follow the controller."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_programs import (
    addresses,
    child_ends,
    dies_later,
    fail,
    gone,
    nested,
    pid,
    place,
    run,
    scheduling,
    sees,
    total,
)

import fsdp_testing
from fsdp_testing.errors import BackendUnavailable, InvalidArgument, PoolBroken
from fsdp_testing.ranks.pool import Pool, PooledWorld, controller
from fsdp_testing.ranks.pool.controller import default_pool
from fsdp_testing.ranks.pool.forkserver import run_until_it_waits

# ---- lending


def test_a_warm_world_is_lent_again(pool: Pool) -> None:
    first = run(pool.world(2), pid)
    assert run(pool.world(2), pid) == first
    assert len(set(first)) == 2


def test_a_world_lent_for_a_block_is_given_back_however_the_block_ends(pool: Pool) -> None:
    with pool.lend(2) as world:
        pids = world.execute(pid).values
        assert world.busy
    with pytest.raises(ZeroDivisionError), pool.lend(2) as again:
        assert again is world
        1 / 0  # noqa: B018 - it raises
    assert not world.busy
    with pool.lend(2, isolation="fresh") as fresh:
        assert set(fresh.execute(pid).values).isdisjoint(pids)
    assert fresh not in pool.worlds()


def test_two_borrowers_have_two_worlds(pool: Pool) -> None:
    one, two = pool.world(2), pool.world(2)
    assert one is not two
    assert set(run(one, pid)).isdisjoint(run(two, pid))


def test_a_fresh_world_ends_when_given_back(pool: Pool) -> None:
    world = pool.world(2, isolation="fresh")
    pids = run(world, pid)
    assert world not in pool.worlds()
    assert gone(pids)
    with pytest.raises(PoolBroken, match="expected an open world, got one that is closed"):
        world.execute(pid)


def test_a_world_that_failed_is_replaced(pool: Pool) -> None:
    world = pool.world(2)
    before = world.pids
    assert not world.execute(fail).ok
    world.release()
    assert gone(list(before))
    assert set(run(pool.world(2), pid)).isdisjoint(before)


def test_a_rank_that_ends_between_two_calls_is_nobodys_fault(pool: Pool) -> None:
    world = pool.world(2)
    before = world.pids
    assert world.execute(dies_later, lasting=None).ok
    assert gone(list(before))
    world.release()
    assert run(pool.world(2), total) == [8.0, 8.0]


def test_a_rank_that_ended_before_the_call_is_told_so(pool: Pool) -> None:
    world = pool.world(2)
    assert world.execute(total).ok
    os.kill(world.pids[1], signal.SIGKILL)
    assert gone([world.pids[1]])
    outcome = world.execute(total)
    world.release()
    assert outcome.cause.startswith("rank 1 died by SIGKILL before it began this call"), outcome.describe()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_size(pool: Pool, size: int) -> None:
    world = pool.world(size, isolation="fresh")
    assert run(world, total) == [4.0 * size] * size


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has policies of scheduling")
def test_ranks_are_not_interrupted_for_each_other(pool: Pool) -> None:
    before = scheduling()
    asked = os.SCHED_BATCH if os.sched_getscheduler(0) == os.SCHED_OTHER else os.sched_getscheduler(0)
    assert run(pool.world(2, isolation="fresh"), scheduling) == [{asked}] * 2
    assert scheduling() == before


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has policies of scheduling")
def test_a_policy_of_scheduling_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: asked.append(arguments))
    for policy in (os.SCHED_IDLE, os.SCHED_FIFO, os.SCHED_BATCH):
        monkeypatch.setattr(os, "sched_getscheduler", lambda _, policy=policy: policy)
        run_until_it_waits()
    assert not asked


def test_idle_worlds_are_limited(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_MOST_IDLE_RANKS", 4)
    for world in [pool.world(2) for _ in range(5)]:
        assert run(world, total) == [8.0] * 2
    run(pool.world(1, isolation="fresh"), pid)  # a world that is made ends those that were idle longest
    assert sum(len(world.pids) for world in pool.worlds() if not world.busy) <= 4
    assert run(pool.world(2), total) == [8.0] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "expected a size of at least 1, got 0"),
        ((-2,), "got -2"),
        ((True,), "got True"),
        (("2",), "got '2'"),
        ((2.0,), "got 2.0"),
        ((100_000,), "expected at most 256 ranks that are processes"),
        ((2, "mpi2"), "expected a backend among gloo, nccl, fake.*, got 'mpi2'"),
        ((2, "gloo", "cold"), "expected isolation 'warm' or 'fresh', got 'cold'"),
    ],
)
def test_bad_arguments(pool: Pool, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        pool.world(*arguments)


def test_arguments_that_cannot_be_sent(pool: Pool) -> None:
    world = pool.world(1)
    with pytest.raises(InvalidArgument, match="expected arguments that can be sent to ranks, got TypeError"):
        world.execute(total, (threading.Lock(),))
    assert run(world, total) == [4.0]


# ---- the fake backend


def test_one_process_is_any_rank_of_any_size(pool: Pool) -> None:
    assert run(pool.world(1024, "fake").at(7), place) == [(7, 1024, "cpu")]
    assert run(pool.world(1024, "fake").at(1023), place) == [(1023, 1024, "cpu")]
    # The next borrower does not inherit the place.
    assert run(pool.world(1024, "fake"), place) == [(0, 1024, "cpu")]
    assert run(pool.world(100_000, "fake").at(99_999), place) == [(99_999, 100_000, "cpu")]


def test_a_fake_world_reports_as_the_rank_it_stands_for(pool: Pool) -> None:
    world = pool.world(16, "fake").at(5)
    outcome = world.execute(fail)
    world.release()
    assert [rank.rank for rank in outcome.ranks] == [5]
    assert outcome.cause == "rank 5 raised ValueError: planted"


@pytest.mark.parametrize("rank", [-1, 4, "1", True])
def test_a_rank_outside_the_world(pool: Pool, rank: Any) -> None:
    world = pool.world(4, "fake")
    with pytest.raises(InvalidArgument, match="expected a rank from 0 to 3"):
        world.at(rank)
    world.release()


def test_a_world_of_processes_stands_for_nobody(pool: Pool) -> None:
    world = pool.world(2)
    with pytest.raises(InvalidArgument, match="expected a backend of one process, such as 'fake', got 'gloo'"):
        world.at(1)
    world.release()


# ---- nccl


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_says_once_why_it_cannot_run(pool: Pool) -> None:
    world = pool.world(2, "nccl")
    outcome = world.execute(total)
    world.release()
    assert outcome.cause.startswith(
        "every rank raised BackendUnavailable: backend 'nccl' cannot run a world of 2 here: "
    )
    # The second time nothing is started.
    with pytest.raises(BackendUnavailable, match="backend 'nccl' cannot run a world of 2 here"):
        pool.world(2, "nccl")


# ---- what ranks see of the controller


def test_kept_ranks_follow_the_controller(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pool.world(2), pid)
    monkeypatch.setenv("HARNESS_TEST", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere/at/all")
    assert run(pool.world(2), sees, "HARNESS_TEST") == [("1", str(tmp_path), ["/nowhere/at/all"])] * 2
    monkeypatch.undo()
    seen = run(pool.world(2), sees, "HARNESS_TEST")
    assert [(value, where) for value, where, _ in seen] == [(None, os.getcwd())] * 2


def test_sockets_are_bound_to_loopback_alone(pool: Pool) -> None:
    listening = [address for found in run(pool.world(2, isolation="fresh"), addresses) for address in found]
    assert listening, "the store of rank 0 listens"
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}, listening


def test_worlds_do_not_nest(pool: Pool) -> None:
    for said in run(pool.world(2), nested):
        assert "expected the controlling process, got a rank of a world" in said


# ---- threads and forks of the controller


def test_threads_use_worlds_side_by_side(pool: Pool) -> None:
    results: list[Any] = []

    def loop() -> None:
        for _ in range(10):
            results.append(run(pool.world(2), total))

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[8.0, 8.0]] * 30


def sleeps() -> None:
    threading.Event().wait(0.5)


def test_one_world_runs_one_call(pool: Pool) -> None:
    world = pool.world(2)
    thread = threading.Thread(target=world.execute, args=(sleeps,))
    thread.start()
    refused = threading.Event()
    while thread.is_alive() and not refused.is_set():
        try:
            world.execute(pid)
        except PoolBroken as error:
            assert "runs a call for another thread" in str(error)
            refused.set()
    thread.join()
    assert refused.is_set()
    assert run(world, total) == [8.0, 8.0]


def test_ranks_outlive_the_thread_that_first_used_the_pool() -> None:
    pool = Pool()
    worlds: list[PooledWorld] = []
    thread = threading.Thread(target=lambda: worlds.append(pool.world(2)))
    thread.start()
    thread.join()
    assert run(worlds[0], total) == [8.0, 8.0]
    assert run(pool.world(3), total) == [12.0] * 3
    pool.close()


def test_a_forked_child_of_the_controller_harms_nothing(pool: Pool) -> None:
    world = pool.world(2)
    assert world.execute(total).ok
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                world.execute(total)
            except PoolBroken as error:
                code = 0 if "a forked child of it" in str(error) else 2
            world.release()
            world.discard()
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(world, total) == [8.0, 8.0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_forked_child_of_a_rank_tells_its_parent_whether_it_failed(pool: Pool, fails: bool) -> None:
    with pool.lend(1) as world:
        outcome = world.execute(child_ends, kwargs={"fails": fails})
    assert outcome.values == [int(fails)]
    assert ("ValueError: planted" in outcome.ranks[0].stderr) is fails


def test_the_default_pool_is_one_for_all_threads() -> None:
    found: list[Pool] = []
    threads = [threading.Thread(target=lambda: found.append(default_pool())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(pool) for pool in found}) == 1


def test_a_port_that_is_taken_disturbs_nobody(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert run(pool.world(2, isolation="fresh"), total) == [8.0, 8.0]


def origins(name: str) -> tuple[str, str]:
    """Where this package, and a module that the fork server imported ahead, come from."""
    return sys.modules["fsdp_testing"].__file__ or "", getattr(sys.modules.get(name), "__file__", "not imported ahead")


@pytest.mark.parametrize("on_path", [True, False])
def test_the_fork_server_imports_what_the_controller_would(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of the package lies in the current folder, which is on the path or not: a checkout beside a wheel."""
    (tmp_path / "here" / "fsdp_testing").mkdir(parents=True)
    (tmp_path / "here" / "fsdp_testing" / "__init__.py").write_text("raise ImportError('the other copy')")
    (tmp_path / "there").mkdir()
    for folder in ("here", "there"):
        (tmp_path / folder / "chosen.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "there"))
    if on_path:
        sys.path.insert(0, "")  # what a controller begun with `python -c` has
    pool = Pool(preload_modules=("chosen",))
    try:
        world = pool.world(2, "fake")
        monkeypatch.chdir(tmp_path)
        [(ours, chosen)] = run(world, origins, "chosen")
    finally:
        pool.close()
    assert Path(ours).samefile(fsdp_testing.__file__ or "")
    assert chosen == str(tmp_path / ("here" if on_path else "there") / "chosen.py")
